"""Values, YAML and bytes that have broken programs before."""

from hypothesis import strategies as st

FLOATS = st.floats(allow_subnormal=False)  # torch has switched these off in this process
HUGE = [-1, 0, 1, 3, 10**6, 10**9, 2**31, 2**63, 10**30, -(2**63), 0.5, -0.5, 1e-300, 1e308, -1e308, 1e400]
ODD = [
    *"|~|null|true|off|nan|inf|-inf|1e3|0x10|1_0|[]|[1,|{}|{a: 1}|a,b|[a, 1, null]|[[[[]]]]|!x y|*a|&a b|<<".split("|"),
    *"--|-1|../..|/dev/null|/proc/self/mem|hf:|hf:x?y=1|@/etc/passwd|${HOME}|!!python/name:os.system".split("|"),
    " ", "\x00", "\n", "\udcff", "é" * 300, "a" * 5000,
]  # fmt: skip
SCALARS = st.one_of(st.sampled_from(HUGE), st.sampled_from(ODD), st.text(max_size=8), st.integers(), FLOATS)
SECTIONS = st.dictionaries(st.text(max_size=4), SCALARS)
VALUES = st.one_of(SCALARS, st.booleans(), st.none(), st.lists(SCALARS, max_size=3), SECTIONS)

HURTING = [
    b"a: &a [x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a]\nc: [*b, *b, *b, *b]", b"data: &a {b: *a}", b"<<: {seed: 1}",
    b"trainer:\n  extra: {x: " + b"[" * 3000 + b"]" * 3000 + b"}", b"trainer: {extra: &a {b: *a}}", b"? {a: b}\n: c",
    b"!!python/object/apply:os.system ['id']", b"seed: !!binary aGk=", b"1: 2\nnull: 3\ntrue: 4", b"--- a\n--- b",
    b"seed: 1\n" * 2, b"%YAML 9.9\n---\na: b", b"seed: 2001-01-01", b"seed: 1:30:00", b"seed: " + b"9" * 5000,
    b"# " + b"x" * 10**6, b"seed:\n\t1",
]  # fmt: skip

ENCODINGS = st.sampled_from("utf-8 utf-8-sig utf-16 utf-16-le utf-32 cp1252 latin-1 koi8-r shift_jis utf-7".split())
SUFFIXES = ".txt .txt .TXT .text .txt.gz .zip .jsonl .csv .tsv .parquet .jsonl.gz .parquet.gz .png".split()
SHAPES = [
    b"", b"\x00" * 5000, b"a" * 10**6, b"\n" * 10**5, b"\r" * 5000, "ﬀ\u0301".encode() * 3000, b"\xff\xfe",
    b"*** START OF THE PROJECT GUTENBERG\n", b"\x1b[31mred\x1b[0m " * 50, b"<|endoftext|><mask><pad>" * 20, b"PAR1PAR1",
    b"{}\n[]\nnull\n", b'{"text": "\\ud800"}\n', b'{"text": 1}', b'"text"\n"a\nb', b"text\n" + b'"' * 999,
    b"\xed\xa0\x80" * 9, b"\xef\xbb\xbf",
]  # fmt: skip
CONTENTS = st.one_of(
    st.sampled_from(SHAPES),
    st.binary(max_size=300),
    st.builds(lambda text, encoding: text.encode(encoding, "replace"), st.text(max_size=200), ENCODINGS),
)
