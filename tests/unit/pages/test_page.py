"""Whole pages and their text: well-formed, nothing from elsewhere, and only their own script may run."""

import base64
import hashlib
import re

import pytest

from tests.pages import Reader
from thinwire.pages.markdown import markdown
from thinwire.pages.page import document, facts, folded, section, settings


def test_a_page_is_whole_and_needs_nothing() -> None:
    body = [
        facts([("a", "1")]),
        settings([("b", "<2>")]),
        folded("more `x`", markdown("- a\n- b")),
        section("s", "S", ["<p>x</p>"]),
    ]
    page = document("T & U", body, 5)
    read = Reader(page)
    assert read.within("title") == ["T & U"]
    assert not read.fetched
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", page)
    assert read.all("body")[0]["data-refresh"] == "5"
    assert "<2>" in read.within("dd")


def test_only_its_own_style_and_script_may_act() -> None:
    page = document("T", [])
    policy = Reader(page).all("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"] or ""
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "form-action 'none'" in policy


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* & <c>", "<p>a <em>b</em> &amp; &lt;c&gt;</p>"),
        ("**a `b`** L\\*a\\*b", "<p><strong>a <code>b</code></strong> L*a*b</p>"),
        ("# A\n\ntext\nmore", "<h2>A</h2>\n<p>text more</p>"),
        ("*a b*: 2*3*4, * c * and *: d", "<p><em>a b</em>: 2*3*4, * c * and *: d</p>"),
        ("- a\n  b\n- **c**", "<ul><li>a\n  b</li><li><strong>c</strong></li></ul>"),
        ("```bash\nrm <x>\n\ny\n```", "<pre><code>rm &lt;x&gt;\n\ny</code></pre>"),
        ("[a](../b.md#c)", '<p><a href="../b.md#c">a</a></p>'),
        ("[a](javascript:b) [c](//d)", "<p>a c</p>"),
        ("[a](/\\d) [b](\x01javascript:c)", "<p>a b</p>"),
        ("```\na\n```\nb", "<pre><code>a</code></pre>\n<p>b</p>"),
        ("a\n```\nb", "<p>a</p>\n<pre><code>b</code></pre>"),
    ],
)
def test_a_small_part_of_markdown(text: str, html: str) -> None:
    assert markdown(text) == html


def test_tables_scroll_in_their_own_box_and_keep_their_sides() -> None:
    page = markdown("| a | b |\n| --- | ---: |\n| x \\| y | **1** |\n| only |")
    read = Reader(page)
    assert read.all("div", kind="wide")
    assert read.within("td") == ["x | y", "only"]
    assert read.within("strong") == ["1"]
    assert [one.get("class") for one in read.all("td")] == [None, "right", None]
