"""A chat template for each tool format, written for these tests: calls look as in the family's own templates."""

from __future__ import annotations

from specdec.wire.tool_formats import (
    GLM,
    GLM_DENSE,
    GRANITE,
    HERMES,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
    SEED,
    ToolFormat,
)


def _template(calls: str, tools: str = "tools: {{ tools | tojson }}\n", prompt: str = "") -> str:
    """Return a template that renders a turn's content, then its calls."""
    return (
        "{% if tools %}" + tools + "{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}" + calls + "\n{% endfor %}" + prompt
    )


def _each(call: str) -> str:
    return "{% for c in m.tool_calls %}" + call + "{% endfor %}"


def _tagged(begin: str, argument: str, end: str) -> str:
    value = "{{ value if value is string else value | tojson }}"
    arguments = "{% for key, value in c.function.arguments | items %}" + argument + "{% endfor %}"
    return _template(_each(begin + arguments.replace("VALUE", value) + end))


_NAME, _ARGUMENTS, _KEY = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}", "{{ key }}"
_FUNCTIONS = "{{ m.tool_calls | map(attribute='function') | list | tojson }}"
_GLM_VALUE = "<arg_value>VALUE</arg_value>"

TEMPLATES: dict[ToolFormat, str] = {
    HERMES: _template(_each("<tool_call>\n{{ c.function | tojson }}\n</tool_call>")),
    MISTRAL: "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}"
    "{% elif m.tool_calls %}[TOOL_CALLS]" + _FUNCTIONS + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    MISTRAL_ARGS: _template(_each("[TOOL_CALLS]" + _NAME + "[ARGS]" + _ARGUMENTS)),
    LLAMA: _template(
        _each('{"name": "' + _NAME + '", "parameters": ' + _ARGUMENTS + "}"),
        'Answer {"name": function, "parameters": arguments}: {{ tools | tojson }}\n',
        "{% if messages[-1].role != 'assistant' %}assistant: {% endif %}",
    ),
    GRANITE: _template("{% if m.tool_calls %}<|tool_call|>" + _FUNCTIONS + "{% endif %}"),
    QWEN_CODER: _tagged(
        "<tool_call>\n<function=" + _NAME + ">\n",
        "<parameter=" + _KEY + ">\nVALUE\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    SEED: _tagged(
        "<seed:tool_call>\n<function=" + _NAME + ">\n",
        "<parameter=" + _KEY + ">VALUE</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    GLM: _tagged("<tool_call>" + _NAME + "\n", "<arg_key>" + _KEY + "</arg_key>\n" + _GLM_VALUE + "\n", "</tool_call>"),
    GLM_DENSE: _tagged("<tool_call>" + _NAME, "<arg_key>" + _KEY + "</arg_key>" + _GLM_VALUE, "</tool_call>"),
    MINIMAX: _tagged(
        '<minimax:tool_call>\n<invoke name="' + _NAME + '">\n',
        '<parameter name="' + _KEY + '">VALUE</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
}
