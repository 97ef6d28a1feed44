"""Languages, guessed from a sentence or two."""

import pytest

from pipeline.data.languages import guess_language

SAMPLES = {
    "en": "She had been told that it was not the custom, and yet he went with his brother to the house by the sea.",
    "de": "Er sagte, dass er nicht mit der Bahn kommen werde, und sie ging allein auf die Straße zu den Feldern.",
    "fr": "Il est venu dans la maison avec une lettre pour elle, et les enfants ne sont pas sortis de la cuisine.",
    "es": "No se sabe por qué los hombres de la ciudad no quieren hablar con el viejo que vive en una casa del puerto.",
    "it": "Non si sa che cosa il vecchio della casa di fronte ha detto per la prima volta con la voce di un altro.",
    "nl": "Het was niet de eerste keer dat hij met een brief van haar op de trap zat te wachten, maar zij kwam niet.",
    "sv": "Det var en dag som alla andra, och han gick inte till skolan för att hon var sjuk.",
    "cs": "Byl to den jako každý jiný, ale on se na cestu do města nedíval, protože by to pro něj bylo dlouhé.",
    "ru?": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
    "el": "Όλες οι ευτυχισμένες οικογένειες μοιάζουν μεταξύ τους",
    "ja": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "zh": "子曰學而時習之不亦說乎",
    "?": "xq zzk 123 blorp wug frindle snark mome rath",
}


@pytest.mark.parametrize("language", SAMPLES)
def test_a_sentence_shows_its_language(language: str) -> None:
    assert guess_language(SAMPLES[language]) == language


def test_numbers_and_nothing_have_no_language() -> None:
    assert guess_language("") == guess_language("1 2 3 — !") == "?"
