from penstock.extensions.tools.sandbox.head_tail import HeadTailBuffer


def test_short_output_is_kept_whole() -> None:
    kept = HeadTailBuffer(10)
    for piece in (b"01234", b"56789"):
        kept.add(piece)
    assert kept.text() == "0123456789"


def test_long_output_keeps_its_ends() -> None:
    kept = HeadTailBuffer(10)
    for number in range(1000):
        kept.add(b"%03d" % number)
    assert kept.text() == "00000\n[... 2990 bytes are left out here ...]\n98999"
    assert kept.total == 3000


def test_cut_character_is_left_out() -> None:
    kept = HeadTailBuffer(6)
    kept.add("ééééé".encode())
    assert kept.text() == "é\n[... 4 bytes are left out here ...]\né"


def test_bytes_that_are_no_text_are_replaced() -> None:
    kept = HeadTailBuffer(10)
    kept.add(b"a\xff")
    assert kept.text() == "a�"
