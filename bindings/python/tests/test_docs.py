"""docs/python.md: its programs run, in their order, and its tables name what there is."""

import re

import conftest
import flashback_attention as fa

DOCUMENT = (conftest.ROOT / "docs/python.md").read_text()


def test_programs(capsys):
    for module in ("numpy", "torch", "transformers"):
        conftest.need(module, "docs/python.md")
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, flags=re.M | re.S)
    assert len(blocks) >= 7
    exec(compile("\n".join(blocks), "docs/python.md", "exec"), {"__name__": "docs"})
    said = capsys.readouterr().out
    for promise in re.findall(r"# (\(False.*\)|\d+ calls.*)$", DOCUMENT, flags=re.M):
        assert promise in said, promise


def test_names():
    """What the document calls by fa. exists, and every keyword of attention stands in it."""
    assert {n for n in re.findall(r"\bfa\.(\w+)", DOCUMENT) if not hasattr(fa, n)} == set()
    keywords = set(fa.attention.__kwdefaults__) - {"return_lse", "max_seqlen_q", "max_seqlen_k"}
    assert {k for k in keywords if f"`{k}" not in DOCUMENT and f", `{k}" not in DOCUMENT} == set()
