"""Reads a page as a browser would: what is open and closed, what is written, and what it would fetch."""

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}
SHAPES = {"path", "rect", "circle"}


class Reader(HTMLParser):
    """``texts`` by the tag that they stand in; ``tags`` with their attributes; ``paths`` are the shapes' own."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SHAPES, f"<{tag}/> is not closed in HTML"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data))

    def within(self, tag: str) -> list[str]:
        """All texts directly in such a tag."""
        return [text for at, text in self.texts if at == tag]

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        """The attributes of all such tags; ``kind`` is a word of their class."""
        kind = wanted.pop("kind", "")
        found = [attributes for name, attributes in self.tags if name == tag]
        if kind:
            found = [one for one in found if kind in (one.get("class") or "").split()]
        return [one for one in found if all(one.get(name) == value for name, value in wanted.items())]

    @property
    def fetched(self) -> list[str]:
        """What a browser would load from elsewhere, or run."""
        found = []
        for tag, attributes in self.tags:
            for name, value in attributes.items():
                if name in ("src", "srcset", "action", "data", "poster") or (tag == "link" and name == "href"):
                    found.append(f"{tag} {name}={value}")
                if name.startswith("on"):
                    found.append(f"{tag} {name}")
                if name == "href" and ":" in (value or ""):
                    found.append(f"{tag} {name}={value}")
        return found
