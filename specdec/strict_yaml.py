"""YAML files, read strictly: duplicate keys are refused, where PyYAML would use the last one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

MERGE, NULL = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:null"


class YamlFileError(Exception):
    """A file cannot be read, or is invalid YAML; the message is one line without the file's name."""


def load(path: Path) -> Any:
    """Return the contents of a YAML file; YamlFileError if it is unreadable or invalid."""
    return _loaded(path, _Loader)


def load_text(path: Path) -> Any:
    """Return the contents of a YAML file with each number, boolean and date as it is spelled, such as 3.10 and off;
    YamlFileError if it is unreadable or invalid."""
    return _loaded(path, _TextLoader)


def _loaded(path: Path, loader: type[_Loader]) -> Any:
    try:
        return yaml.load(path.read_text(), loader)
    except OSError as error:
        raise YamlFileError(error.strerror or str(error)) from None
    except yaml.MarkedYAMLError as error:  # its str quotes the line, perhaps with an API key
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise YamlFileError(" ".join(f"{place}{problem}".split())) from None
    except (ValueError, yaml.YAMLError) as error:  # an impossible date is a ValueError
        raise YamlFileError(" ".join(str(error).split())) from None


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse duplicate keys in the text; keys from a merge (`<<`) may be overridden."""
        node = super().compose_mapping_node(anchor)
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE]
        if len(set(keys)) < len(keys):
            (_, key), _ = Counter(keys).most_common(1)[0]
            raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return node


class _TextLoader(_Loader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's
        first: [(tag, pattern) for tag, pattern in resolvers if tag in (MERGE, NULL)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
