"""How lines and points look in all figures. Marks and dashes differ, so that they read in grey."""

MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
# Dark enough for small letters on white, and apart for the colour-blind: what `thinwire.studies.q19_figures` checks.
COLOURS = ("#000000", "#b04e00", "#0072b2", "#1f5c3b", "#9a0d78", "#5a2fe6", "#807146", "#757575", "#8c1c10", "#4c1100")
# The same hues, light enough for a dark page.
COLOURS_ON_DARK = (
    *("#f2f2f2", "#ff9f5a", "#62baf6", "#6fd09b", "#f18ad8", "#ab99ff", "#d0be80", "#a3a8ae", "#ff8b7e", "#dba78c"),
)
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (1, 1.5), (8, 2, 1, 2), (3, 1.5), (5, 1, 1, 1, 1, 1))


def mark_of(style: int) -> str:
    """The mark of a style with this number; the second ten have the colours of the first, and other marks."""
    num = len(MARKS)
    return MARKS[(style + num // 2 * (style // num)) % num]
