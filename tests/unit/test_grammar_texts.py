"""Regular expressions, choices and grammars (GBNF, Lark): accepted and rejected texts, and refused constructs."""

from __future__ import annotations

import re

import pytest

from engine.grammar.patterns import search_language
from engine.grammar.regex import matches
from engine.grammar.spec import GrammarError, Kind
from tests.support.grammars import accepts, compiled

PATTERNS = [
    (r"[a-c]{2,3}", ["ab", "abc"], ["a", "abcd", "xy"]),
    (r"(foo|bar)+-\d", ["foo-1", "barfoo-9"], ["foo", "-1", "foo-12"]),
    (r"^a$|^b", ["a", "b"], ["ab", "c"]),
    (r"(?:x|y)?z*?", ["", "x", "zzz", "yz"], ["xy"]),
    (r"(?P<year>\d{4})-(?<month>\d\d)", ["2024-01"], ["24-1"]),
    (r"(?!ab)[a-z]{2}", ["ac", "ba"], ["ab", "abc"]),
    (r"[^\s\"/]+", ["é!", "a"], ["a b", '"', "a/b"]),
    (r"\x41\u00e9\u{1F600}\t", ["Aé😀\t"], ["Aé"]),
    (r"\p{Lu}\P{Lu}", ["Äx", "A1"], ["xx"]),
    (r"(?!b)\d", ["1"], ["٣", "b"]),
    (r"(?!\d).", ["a"], ["1", "٣"]),
    (r"(?!(?!\d)).", ["1"], ["٣", "a"]),
    (r"[^\d]", ["a"], ["1", "٣"]),
    (r"[^\D]", ["1"], ["٣", "a"]),
    (r"[\D]", ["a"], ["1", "٣"]),
    (r"[^\W]\d", ["a1"], ["é1", "a٣"]),
    (r"\cA\cz\0\v\f\r\n", ["\x01\x1a\0\v\f\r\n"], ["A"]),
    (r"[\b\x41-\x43\]-]", ["\b", "B", "]", "-"], ["b", "D"]),
    (r"\ud83d\ude00|\u{e9}", ["😀", "é"], ["\ufffd"]),
    (r"[\w-.]", ["a", "-", "."], [",", " "]),
    (r"a{2}b{1,}c{0,1}", ["aab", "aabbc"], ["ab", "aa", "aabcc"]),
    (r"a{0}b{2}?c+?", ["bbc", "bbcc"], ["abbc", "bb"]),
    (r".", ["a", "é", "😀"], ["\n", "", "ab"]),
    (r"[\w.-]+", ["a.b-c_1"], ["a b", ""]),
    (r"{a}x{}{,}", ["{a}x{}{,}"], ["ax"]),
]


@pytest.mark.parametrize(("pattern", "valid", "invalid"), PATTERNS, ids=[pattern for pattern, _, _ in PATTERNS])
def test_a_regex_matches_the_whole_text(pattern: str, valid: list[str], invalid: list[str]) -> None:
    grammar = compiled("regex", pattern)
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


SEARCHED = [
    *("^a|b$", "foo", "^(?!foo)[a-z]+$", "^(a|b$)", "(^a$)|(^b+$)", "^.*(?=.{4}).*[0-9]$", "^$|^x", "^(?=.*a)(?=.*b)"),
    *("(?=^b)b", "b(?!^)", "(?!^b?)|a$", "x(^a|b)", "(?=^.{3,}$)(?=.*1).*$", "(?:^)ba|1|(?=^)b", "(?!(?=^)b).1?$"),
    *("a+^b|x", "(a|b)+^|1", "(?=a*)b", "a(?!$)", "^a?$|b"),
    *("^(a?){3}b?$", "^(a|b){2,3}$", "^(ab?){0,2}$", "^(fo{2,}){1,}$", "^(a*){2}1?$", "^(b?a?){2,}$", "^.{3,4}$"),
]
TEXTS = ["", "a", "b", "ab", "ba", "foo", "foox", "xfooy", "abc1", "bb", "x1", "a1", "axb"]


@pytest.mark.parametrize("pattern", SEARCHED)
def test_a_schema_pattern_searches_like_python(pattern: str) -> None:
    assert [text for text in TEXTS if matches(search_language(pattern), text)] == [t for t in TEXTS if re.search(pattern, t)]


def test_choices_match_exactly() -> None:
    grammar = compiled("choice", '["yes", "yes, sir", "né\\"\\n/"]')
    assert all(accepts(grammar, text) for text in ("yes", "yes, sir", 'né"\n/'))
    assert not any(accepts(grammar, text) for text in ("", "ye", "yes,", "no"))


GBNF = """
root  ::= "{" ws pair ("," ws pair)* "}"   # an object
pair  ::= [a-z]{1,3} ":" num
        | "x-y"
num   ::= [0-9]+ | "\\u00e9"
ws    ::= " "*
"""


def test_a_gbnf_grammar_accepts_exactly_its_texts() -> None:
    grammar = compiled("grammar", GBNF)
    assert all(accepts(grammar, text) for text in ("{ab:12}", "{ab:12, c:3}", "{x-y}", "{a:é}"))
    assert not any(accepts(grammar, text) for text in ("{}", "{abcd:1}", "{ab:12,}", "{ab:12"))


def test_gbnf_alternatives_are_not_committed_to() -> None:
    grammar = compiled("grammar", 'root ::= ("ab" | "abc") "cd" [a]* "a"')
    assert accepts(grammar, "abcda")
    assert accepts(grammar, "abccdaaa")


GBNF_TEXTS = [
    (r'root ::= "\x41B\u00e9\U0001F600x"', ["ABé😀x"], ["A"]),
    (r'root ::= "\n\t\r\"\\\[\]\-\^\/"', ['\n\t\r"\\[]-^/'], ["nt"]),
    ('root ::= . "a"', ["\na", "éa"], ["a", "aba"]),
    (r"root ::= [^a-c\]-]", ["d", "x", "\n"], ["a", "b", "c", "]", "-"]),
    ("root ::= [a-]+", ["a-", "-"], ["b"]),
    ('root ::= "a" |\n  "b" |\r\n\t"c"', ["a", "b", "c"], ["ab"]),
    ('root ::=\n  "a"\n', ["a"], [""]),
    ('root ::= ("a" | ) "b"', ["ab", "b"], ["a"]),
    ('# two rules\nroot ::= x-1_y # the other\nx-1_y ::= "a"', ["a"], ["b"]),
    ('root ::= ( # a group\n "a" # in it\n )? "b"', ["ab", "b"], ["a"]),
    ('root ::= "a"{2}{,2}"b"{ 1 , 2 }"c"{2,}', ["aabcc", "aaaabbccc", "bcc"], ["abcc", "aaaaaabcc", "aabbbcc", "aabc"]),
]


@pytest.mark.parametrize(("text", "valid", "invalid"), GBNF_TEXTS, ids=[text for text, _, _ in GBNF_TEXTS])
def test_gbnf_notation_is_read_as_llama_cpp_reads_it(text: str, valid: list[str], invalid: list[str]) -> None:
    grammar = compiled("grammar", text)
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


@pytest.mark.parametrize("bounds", ["{0}", "{0,0}", "{,0}"])
def test_a_gbnf_repetition_of_zero_matches_nothing(bounds: str) -> None:
    grammar = compiled("grammar", f'root ::= "a" "b"{bounds}')
    assert accepts(grammar, "a")
    assert not accepts(grammar, "ab")


@pytest.mark.parametrize("text", ['"a" *', '( "a"\n * )', '("a" # or none\n {0,})', '("a" ?) {9}'])
def test_a_gbnf_quantifier_may_stand_apart(text: str) -> None:
    grammar = compiled("grammar", f'root ::= {text} "b"')
    assert all(accepts(grammar, text) for text in ("b", "aab"))
    assert not accepts(grammar, "a")


def test_a_recursive_grammar_accepts_balanced_texts_only() -> None:
    grammar = compiled("grammar", 'root ::= "(" root ")" | ""')
    assert accepts(grammar, "((()))")
    assert not accepts(grammar, "(()")


def test_a_lark_grammar_accepts_exactly_its_texts() -> None:
    grammar = compiled("grammar", 'start: WORD ("," WORD)*\nWORD: /[a-z]+/ & ~/bad/\n')
    assert accepts(grammar, "good,fine")
    assert not accepts(grammar, "good,bad")


@pytest.mark.parametrize("expression", [r"/<[@]\n%json/", "/<[@]\n%json/"], ids=["one line", "two lines"])
def test_what_a_lark_grammar_quotes_is_not_syntax(expression: str) -> None:
    assert accepts(compiled("grammar", f'start: "<" {expression} # <x>\n'), "<<@\n%json")


REFUSED: list[tuple[Kind, str, str]] = [
    ("regex", "(", "unclosed"),
    ("regex", "a**", "quantifier"),
    ("regex", "a{2}{3}", "nothing to repeat at 4"),
    ("regex", "(a+{2,})", "nothing to repeat at 3"),
    ("regex", "b|{2}", "nothing to repeat at 2"),
    ("regex", r"(a)\1", "back-reference"),
    ("regex", r"\ba", "word boundary"),
    ("regex", "(?<=a)b", "lookbehind"),
    ("regex", "(?i)a", r"the group \(\?i"),
    ("regex", "a{3,2}", "repetition"),
    ("regex", "a?^b", r"\^ after what may be empty"),
    ("regex", "(a*|b)(?=^)", r"\^ after what may be empty"),
    ("regex", "a(^b|$)+", "a repeated anchor"),
    ("regex", "a{,3}", "two ways"),
    ("regex", "(a|b){1000000000}", "repetition of more than"),
    ("regex", "a{1,99999999999999999999}", "repetition of more than"),
    ("regex", f"a{{{'9' * 5000}}}", "repetition of more than"),
    ("regex", "[z-a]", "backwards"),
    ("regex", r"\q", "unknown escape"),
    ("regex", "[]", "empty class"),
    ("regex", "[^]", "empty class"),
    ("regex", "[a", "an unfinished construct at the end"),
    ("regex", "a\\", "an unfinished construct at the end"),
    ("regex", "a)", "an unopened \\) at 1"),
    ("regex", "a*+", "a quantifier after a quantifier at 2"),
    ("regex", "a??*", "a quantifier after a quantifier at 3"),
    ("regex", "(?=a)+", "a repeated anchor or lookahead"),
    ("regex", "a$b", r"\$ before the end"),
    ("regex", r"\A", r"\\A, which only some dialects know"),
    ("regex", r"\01", "an octal escape"),
    ("regex", r"\c1", r"a malformed \\c escape"),
    ("regex", r"\u12", "malformed hexadecimal"),
    ("regex", r"\u{110000}", "a code point beyond Unicode"),
    ("regex", r"\u{41", "malformed hexadecimal"),
    ("regex", r"\ud83d\u0041", "half of a surrogate pair"),
    ("regex", r"\p{Xx}", r"the character property \\p\{Xx\}"),
    ("regex", r"\pL", "the character property"),
    ("regex", "(?P<1>a)", "a malformed group name"),
    ("regex", "(?<a", "a malformed group name"),
    ("regex", "(?<!a)b", "lookbehind"),
    ("regex", "[^\\s\\S]", "cannot be satisfied"),
    ("grammar", "root ::= x", "the rule x is used"),
    ("grammar", 'root ::= "a', "unclosed string"),
    ("grammar", 'top ::= "a"', "no rule named root"),
    ("grammar", 'root ::= "a"{99999}', "repetition"),
    ("grammar", f'root ::= "a"{{{"0" * 9_000}}}', "malformed repetition"),
    *(("grammar", f'root ::= "\\{digits}"', "the escape") for digits in ("x+1", "x 4", "x4", "u00_4", "x０4", "U00110000")),
    ("regex", r"\x０4", "malformed hexadecimal"),
    ("grammar", 'root ::= "a\n"', r"an unclosed string or class \(line 1\)"),
    ("grammar", "root ::= [a", "an unclosed string or class"),
    ("grammar", r'root ::= "\q"', r"the unknown escape \\q \(line 1\)"),
    ("grammar", 'root ::= "\\', "the unknown escape"),
    ("grammar", "root ::= [z-a]", "a range of characters that runs backwards"),
    ("grammar", 'root ::= "a"\nother "b"', r"the rule other without ::= \(line 2\)"),
    ("grammar", 'root ::= "a"\nroot ::= "b"', r"the rule root is defined twice \(line 2\)"),
    ("grammar", 'root ::= ("a"\n', "an unclosed \\("),
    ("grammar", 'root ::= "a")', r"'\)' is out of place"),
    ("grammar", "\nroot ::= *a", r"'\*' where a name should be \(line 2\)"),
    *(("grammar", f'root ::= "a"{bounds}', "malformed repetition") for bounds in ("{,}", "{}", "{a}", "{1", "{12", "{-1}")),
    ("grammar", 'root ::= "a"{3,2}', r"run backwards \(line 1\)"),
    ("grammar", "start: <|special|>", "special tokens"),
    ("grammar", "start: %json {}", "%json"),
    ("grammar", "start: /a\nb/ %json {} /c/", "%json"),
    ("grammar", "start[lazy]: /a*/", "options of a rule"),
    ("grammar", "start: missing", "cannot be compiled"),
    ("grammar", 'start: "<b>" /[<@]/ nothing // %json', "cannot be compiled"),
]


@pytest.mark.parametrize(("kind", "text", "message"), REFUSED, ids=[text[:40] for _, text, _ in REFUSED])
def test_an_unsupported_or_malformed_text_is_refused_by_name(kind: Kind, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        compiled(kind, text)
    assert caught.value.param == f"guided_{kind}"
