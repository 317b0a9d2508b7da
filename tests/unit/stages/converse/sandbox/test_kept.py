from stages.converse.sandbox.kept import Kept


def test_a_short_output_is_kept_whole() -> None:
    """Nothing is left out up to the limit."""
    kept = Kept(10)
    for piece in (b"01234", b"56789"):
        kept.add(piece)
    assert kept.text() == "0123456789"


def test_of_a_long_output_the_ends_are_kept() -> None:
    """The reader learns how much is left out, and where."""
    kept = Kept(10)
    for number in range(1000):
        kept.add(b"%03d" % number)
    assert kept.text() == "00000\n[... 2990 bytes are left out here ...]\n98999"
    assert kept.total == 3000


def test_a_character_that_is_cut_is_left_out() -> None:
    """The gap does not show halves of characters."""
    kept = Kept(6)
    kept.add("ééééé".encode())
    assert kept.text() == "é\n[... 4 bytes are left out here ...]\né"


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    """Any output can be read."""
    kept = Kept(10)
    kept.add(b"a\xff")
    assert kept.text() == "a�"
