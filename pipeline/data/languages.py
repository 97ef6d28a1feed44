"""A guess at the language of a text, from its script and its commonest words."""

import re
import unicodedata
from collections import Counter

# The ten or so commonest words of each language that the others do not share in full.
COMMON_WORDS = {
    "en": "the of and to in that was it he is with as his for had but not she at you",
    "de": "der die und das nicht ich er sie ist zu den mit sich ein war auf es dem des auch",
    "fr": "le la les de et à un une il est que qui dans pas ne pour sur elle vous au",
    "es": "el la los de y que en un una no se por con las su para como más lo del",
    "it": "il la di che e non un una per in si con del le lo da era mi della ma",
    "pt": "o a os de e que não um uma com se para por as em do da ele mais no",
    "nl": "de het een en van ik niet dat hij zij in is met op te zijn was voor maar haar",
    "sv": "och det att en som är jag inte på han för med den hon var ett till sig av om",
    "da": "og det at en som er jeg ikke på han for med den hun var et til sig af om",
    "fi": "ja on ei hän se oli että mutta niin minä kun kuin mitä hänen sitten vaan jo sen myös ole",
    "pl": "i w nie na się z że do to jak ale jest co po tak za był od przez już",
    "cs": "a se na je že v to s z do jsem ale by jako byl tak si za jeho pro",
    "la": "et in est non ad ut cum quod qui sed si ex hoc enim quae per nec esse atque eius",
}
SCRIPTS = {
    "CYRILLIC": "ru?", "GREEK": "el", "HEBREW": "he", "ARABIC": "ar", "DEVANAGARI": "hi?",
    "HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "CJK": "zh", "THAI": "th",
}  # fmt: skip
LANGUAGES: dict[str, list[str]] = {}
for code, common in COMMON_WORDS.items():
    for common_word in common.split():
        LANGUAGES.setdefault(common_word, []).append(code)
SAMPLE_CHARACTERS = 20_000


def guess_language(text: str) -> str:
    """A two-letter code, or ? when nothing speaks for any language; the middle of the text is what counts."""
    start = max(0, (len(text) - SAMPLE_CHARACTERS) // 2)
    words = re.findall(r"[^\W\d_]+", text[start : start + SAMPLE_CHARACTERS].lower())
    if not words:
        return "?"
    scripts: Counter[str] = Counter()
    for letter, count in Counter(word[0] for word in words).items():
        scripts[unicodedata.name(letter, "?").split()[0]] += count
    script = "HIRAGANA" if "HIRAGANA" in scripts else scripts.most_common(1)[0][0]
    if script != "LATIN":
        return SCRIPTS.get(script, "?")
    found = Counter(code for word in words for code in LANGUAGES.get(word, ())).most_common(1)
    return found[0][0] if found and found[0][1] > 0.05 * len(words) else "?"
