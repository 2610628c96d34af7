"""Grammars in EBNF derive the same texts after their translation into Lark."""

from __future__ import annotations

import pytest

from specdec.grammar.ebnf import in_lark, is_ebnf
from specdec.grammar.grammar import MAX_RULES, GrammarError, Kind, source_violation
from tests.grammar.followed import Followed

SQL = """
# vLLM's own example
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("source", "derived", "others"),
    [
        (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_3 ", ""]),
        (ARITHMETIC, ["a=b\n", "(a+12)*c_1= 5\n"], ["a=b", "=\n"]),
        (JSON, ['{"a":[1,-2.5e1,{}],"b":"\\u00e9\\n"}', "{}"], ['{"a":}', "[]", '{"a":01}']),
        ('root ::= [a-z]* "end" [a-z]?', ["end", "energyend", "endend", "endx"], ["energy", "en"]),
        ('root ::= "a" root "b" | word\nword ::= [a-c]{1,2}', ["a", "acb", "aabbb"], ["", "abcd", "aaaa"]),
        ('root ::= x | x "y"\nx ::= "(" x ")" | "a"', ["((a))", "(a)y"], ["(a", "y"]),
        ('root ::= .{2} # two\n | "\\u00e9\\x41\\U0001F600\\"" |', ["xé", 'éA😀"', ""], ["x", "abc"]),
        ("root ::= [^a\\]\\-^] [-a] [\\]b-d]", ["x-]", "bac", "éad"], ["^-]", "aa]", "--b", "x-e"]),
        ('root ::= a-b_1\na-b_1 ::= ("x"\n | "y")+', ["xy"], [""]),
        ('root ::= ("a" root){0} "b" | "c" root "d"', ["b", "ccbdd"], ["a", "ab", "ccb"]),
        ('root ::= "a"{0} "b" root{,0}', ["b"], ["ab", "bb"]),
        ('root ::= "a" {,2} "b"{2,}', ["bb", "aabbb"], ["ab", "aaabb"]),
    ],
)
def test_the_same_texts_are_derived(source: str, derived: list[str], others: list[str]) -> None:
    assert is_ebnf(source)
    followed = Followed(Kind.LARK, in_lark(source))
    assert [text for text in derived if not followed.takes(text)] == []
    assert [text for text in others if followed.takes(text)] == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('start ::= "a"', "line 1, column 1: there is no rule root"),
        ('root ::= "a"\n  | word', "line 2, column 5: there is no rule word"),
        ('root ::= "a\n', "line 1, column 10: unexpected character '\"'"),
        ("root ::= <think>", "line 1, column 10: unexpected character '<'"),
        ('root ::= ("a"', "line 1, column 10: the parenthesis is not closed"),
        ('root ::= "a")', "line 1, column 13: a rule must begin here"),
        ("root ::= * ", "line 1, column 10: unexpected *"),
        ('root ::= "a"**', "line 1, column 14: unexpected *"),
        ('root ::= "a"{3,2}', "line 1, column 13: {3,2} has a maximum below its minimum"),
        ('root ::= "\\q"', "line 1, column 10: \\q is not a valid escape"),
        ('root ::= "\\ud800"', "line 1, column 10: \\ud800 is not a valid character"),
        ("root ::= [z-a]", "line 1, column 10: z-a is not a range"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is defined twice"),
        ("root ::= " + "(" * 60, "line 1, column 60: groups are nested more than 50 deep"),
        ("root ::= ::= a", "line 1, column 10: unexpected ::="),
        ("root ::= a\n" + "\n".join(f'r{n} ::= "a"' for n in range(1100)), "there are more than 1024 rules"),
    ],
)
def test_what_is_not_valid_is_refused_with_its_place(source: str, problem: str) -> None:
    with pytest.raises(GrammarError) as raised:
        in_lark(source)
    assert problem in str(raised.value)


def test_the_most_rules_fit_into_lark() -> None:
    rules = [f'r{number} ::= "a" r{number + 1}?' for number in range(MAX_RULES - 1)]
    source = "\n".join(["root ::= r0", *rules[:-1], f"r{MAX_RULES - 2} ::= root"])
    assert source_violation(Kind.LARK, (in_lark(source),)) is None


def test_lark_is_not_taken_for_ebnf() -> None:
    assert not is_ebnf('start: "a ::= b" | x\nx: /b/')


def test_large_grammars_end_in_time() -> None:
    doubling = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(200))
    assert in_lark(f'root ::= r0\n{doubling}\nr200 ::= "a"').startswith("start: rule_1")
    wide = " ".join(["x"] * 20_000)
    assert in_lark(f"root ::= {wide}\nx ::= [a-z]{{1,500}}")
