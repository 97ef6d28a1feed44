"""Raw bytes to clean text: encodings, control characters, Project Gutenberg notices, hard-wrapped lines."""

import codecs
import re
from dataclasses import dataclass
from itertools import groupby, pairwise

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
CONTROL_BYTES = bytes(code for code in (*range(32), 127) if chr(code) not in "\t\n\r\f\x1a\x1b")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")  # all but tab and newline
WINDOWS_1252 = {byte: text for byte in range(0x80, 0xA0) if (text := bytes([byte]).decode("cp1252", "ignore"))}
SURROGATES = re.compile(r"[\ud800-\udfff]")


@dataclass(slots=True)
class Notes:
    """What was done to a text on the way, for the table that people read."""

    encoding: str = "utf-8"
    replaced: int = 0
    """Bytes that no encoding explains, shown as U+FFFD."""
    controls: int = 0
    """Control characters removed."""
    notice_lines: int = 0
    """Lines of Project Gutenberg notices removed."""
    joined_lines: int = 0
    """Line breaks inside paragraphs joined."""
    blank_lines: int = 0
    """Surplus blank lines removed."""


def clean(text: str, notes: Notes) -> str:
    """One paragraph a line, without notices, control characters and surplus blanks."""
    text = re.sub(r"\r\n|[\r\f\v\x85]", "\n", text)
    text, notes.controls = CONTROLS.subn("", text)
    lines = [line.rstrip() for line in text.split("\n")]
    lines, notes.notice_lines = without_notices(lines)
    lines, notes.joined_lines = unwrapped(lines)
    text = "\n".join(lines).strip("\n")
    text, notes.blank_lines = re.subn(r"\n{3,}", "\n\n", text)
    return text + "\n" if text else ""


# --- Encodings ---------------------------------------------------------------------------------------------------


def decode(data: bytes, notes: Notes) -> str | None:
    """Decode UTF-8, or else the encoding that explains the bytes best; None when they are not text."""
    for mark, encoding in BYTE_ORDER_MARKS:
        if data.startswith(mark):
            notes.encoding = encoding
            return replacing_errors(data[len(mark) :], encoding, notes)
    if guess := wide_encoding(data):
        notes.encoding = guess
        return replacing_errors(data, guess, notes)
    if looks_binary(data):
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return decode_single_bytes(data, notes)


def decode_single_bytes(data: bytes, notes: Notes) -> str:
    """Text that is not valid UTF-8: damaged UTF-8 if most of its other characters are, else cp1252 or Latin-1."""
    damaged = Notes()
    text = replacing_errors(data, "utf-8", damaged)
    intact = sum(map(len, re.findall(r"[^\x00-\x7f\ufffd]+", text)))
    if intact > 4 * damaged.replaced:
        notes.replaced = damaged.replaced
        return text
    try:
        notes.encoding = "cp1252"
        return data.decode("cp1252")
    except UnicodeDecodeError:  # five byte values have no meaning there; the others keep theirs
        notes.encoding = "latin-1"
        return data.decode("latin-1").translate(WINDOWS_1252)


def replacing_errors(data: bytes, encoding: str, notes: Notes) -> str:
    """Decode, with U+FFFD for what cannot be decoded; characters that were already U+FFFD do not count."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        text = data.decode(encoding, errors="replace")
        notes.replaced = text.count("\ufffd") - data.decode(encoding, errors="ignore").count("\ufffd")
        return text


def wide_encoding(data: bytes) -> str:
    """UTF-16 without a mark: in most European text, every other byte is zero."""
    head = data[:4096]
    pairs = len(head) // 2
    if pairs < 2 or len(data) % 2:
        return ""
    first, second = head[0::2].count(0), head[1::2].count(0)
    if second > 0.7 * pairs and first < 0.05 * pairs:
        return "utf-16-le"
    if first > 0.7 * pairs and second < 0.05 * pairs:
        return "utf-16-be"
    return ""


def looks_binary(data: bytes) -> bool:
    """Text has a stray control character at most; archives, pictures and programs are full of them."""
    for start in (0, len(data) // 2):
        head = data[start : start + 65536]
        controls = len(head) - len(head.translate(None, CONTROL_BYTES))
        if controls > 0.02 * len(head) and controls > 1:
            return True
    return False


def without_surrogates(text: str) -> str:
    """Lone surrogates (JSON can carry them) have no UTF-8 form; they become U+FFFD."""
    return SURROGATES.sub("\ufffd", text)


# --- Project Gutenberg ------------------------------------------------------------------------------------------

TEXT_BEGINS = re.compile(
    r"""\s*\*+\s*START\ OF\ (THE|THIS)\ PROJECT\ GUTENBERG
      | \s*\*+\s*END\b[\s*]*(OF\ )?THE\ SMALL\ PRINT""",
    re.IGNORECASE | re.VERBOSE,
)
TEXT_ENDS = re.compile(
    r"""\s*\*+\s*END\ OF\ (THE|THIS)\ PROJECT\ GUTENBERG
      | \s*\**\s*End\ of\ (The\ |this\ )?Project\ Gutenberg
      | \s*\*+\s*START\b[\s*:]*(OF\ )?(THE\ SMALL\ PRINT|FULL\ LICENSE)""",
    re.IGNORECASE | re.VERBOSE,
)
HEADER_BEGINS = re.compile(
    r"\s*\**\s*(The |This is the )?Project Gutenberg('s)?( |-tm )?(E-?Book|E-?text|Edition|\w.*, by )", re.IGNORECASE
)
NOTICE = re.compile(
    r"project\s+gutenberg|small print|\be-?texts?\b|\be-?books?\b|gutenberg\.|michael (s\. )?hart|public domain", re.I
)
CREDITS = re.compile(
    r"\s*\W{0,2}(Produced by|(This )?e-?(text|book) (was )?(prepared|produced|scanned)|Transcribed from|Scanned by)",
    re.I,
)
HEADER_LINES = 600  # the longest header with small print known to us has about 350
LICENCE_CHARACTERS = 40_000  # the longest licence has about 20,000


def without_notices(lines: list[str]) -> tuple[list[str], int]:
    """Remove Project Gutenberg headers, licences and credits wherever they stand; text is never taken for one.

    The file is read as alternating stretches: a notice runs from a header or an end mark to the next mark at which
    text begins. The same word END closes the small print of old headers, so that what follows it is the book.
    """
    if not any("gutenberg" in line.lower() or "small print" in line.lower() for line in lines):
        return lines, 0
    kept: list[str] = []
    notice: list[str] = []
    state, begun = "text", False
    for position, line in enumerate(lines):
        if TEXT_BEGINS.match(line):
            if state != "notice" and not begun and position < HEADER_LINES:
                kept.clear()  # a header that begins without a title line
            kept += [*text_in(notice), ""]
            notice, state, begun = [], "opening", True
        elif TEXT_ENDS.match(line) or (HEADER_BEGINS.match(line) and text_begins_soon(lines, position)):
            notice, state = [*notice, line], "notice"
        elif state == "notice":
            notice.append(line)
        else:
            if state == "opening" and line:  # the first paragraph may name the volunteers
                state = "credits" if CREDITS.match(line) else "text"
            elif state == "credits" and not line:
                state = "opening"
            if state != "credits":
                kept.append(line)
    kept += text_in(notice, certain=any(kept))
    return kept, len(lines) - len(kept)


def text_in(notice: list[str], certain: bool = True) -> list[str]:
    """What a stretch after an end mark holds besides the notice: nothing, unless it is too long or all there is."""
    length = last = 0
    for position, line in enumerate(notice):
        length += len(line) + 1
        if length > LICENCE_CHARACTERS:
            return notice[last + 1 :]
        if NOTICE.search(line):
            last = position
    return [] if certain else notice[last + 1 :]


def text_begins_soon(lines: list[str], position: int) -> bool:
    return any(TEXT_BEGINS.match(line) for line in lines[position : position + HEADER_LINES])


# --- Hard-wrapped lines ------------------------------------------------------------------------------------------


def unwrapped(lines: list[str]) -> tuple[list[str], int]:
    """Join the lines of each paragraph where a book is wrapped at a fixed width; verse, lists and titles stay.

    A break is soft where the next word would not have fitted. Prose has almost only such breaks, verse few.
    """
    blocks = paragraphs(lines)
    width = wrap_width(blocks)
    if not width:
        return lines, 0
    result: list[str] = []
    joined = blanks = 0
    for block in blocks:
        if not block:
            blanks += 1
            continue
        if result:
            result += [""] * (blanks > 1)  # one blank line only parts paragraphs; more are a break in the text
        blanks = 0
        paragraphs_here = joined_paragraphs(block, width) if is_prose([block], width, 0.5) else block
        joined += len(block) - len(paragraphs_here)
        result += paragraphs_here
    return result, joined


def wrap_width(blocks: list[list[str]]) -> int:
    """The width at which a text is wrapped, or 0 when its lines are paragraphs or verse."""
    wrapped = [block for block in blocks if len(block) > 1]
    blanks = [" " in line.strip() for block in wrapped for line in block]
    if 2 * sum(blanks) < len(blanks):  # a script that does not part words, as the Chinese
        return 0
    lengths = sorted(len(line) for block in wrapped for line in block[:-1])
    if len(lengths) < 10:
        return 0
    width = lengths[int(len(lengths) * 0.9)]
    return width if 35 <= width <= 120 and is_prose(wrapped, width, 0.6) else 0


def is_prose(blocks: list[list[str]], width: int, least: float) -> bool:
    """Whether enough lines end because the next word did not fit, and not because a verse ended.

    Verse of even length (Milton's) passes the first test, but begins nearly every line with a capital; a few lines
    of prose may do that by chance, then no word of theirs would have fitted on the line before.
    """
    breaks = [(line, following) for block in blocks for line, following in pairwise(block)]
    soft = sum(line_with_next_word(*pair) > 0.9 * width for pair in breaks)
    capital = sum(following.lstrip()[0].isupper() for _, following in breaks)
    by_chance = len(breaks) < 20 and soft >= 0.9 * len(breaks)
    return soft >= max(1, least * len(breaks)) and (by_chance or capital < 0.8 * len(breaks))


def line_with_next_word(line: str, following: str) -> int:
    """How long a line would be with the first word of the next."""
    return len(line) + 1 + len(following.split(maxsplit=1)[0])


def joined_paragraphs(block: list[str], width: int) -> list[str]:
    """The paragraphs of a wrapped block: a deeper indent or a line that ends early begins a new one."""
    result = [block[0]]
    for line, following in pairwise(block):
        text = following.lstrip()
        indented = len(following) - len(text) > len(line) - len(line.lstrip())
        if indented or line_with_next_word(line, following) < 0.6 * width:
            result.append(following)
        elif re.search(r"\S[-—–]$", line):  # the printed text has no blank there
            result[-1] += text
        else:
            result[-1] += " " + text
    return result


def paragraphs(lines: list[str]) -> list[list[str]]:
    """Runs of lines that are not blank; each blank line is an empty run."""
    blocks: list[list[str]] = []
    for is_text, run in groupby(lines, key=lambda line: bool(line.strip())):
        block = list(run)
        blocks += [block] if is_text else [[] for _ in block]
    return blocks
