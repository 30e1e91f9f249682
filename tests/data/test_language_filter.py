"""The step `language` keeps listed languages, and takes no other language for one of them."""

from __future__ import annotations

import pytest

from argosy.data.curate.language_words import LANGUAGES, Step
from argosy.data.curate.text_batch import TextBatch

LISTED = {
    "en": "When the ship came back to the harbour, there was nobody on the quay, and the captain did not know what to do with the letters.",
    "de": "Als das Schiff in den Hafen zurückkam, war niemand auf dem Kai, und der Kapitän wusste nicht, was er mit den Briefen machen sollte.",
    "fr": "Quand le navire est revenu au port, il n'y avait personne sur le quai, et le capitaine ne savait pas quoi faire avec les lettres.",
    "es": "Cuando el barco volvió al puerto no había nadie en el muelle, y el capitán no sabía qué hacer con las cartas que traía para los vecinos.",
    "it": "Quando la nave è tornata nel porto non c'era nessuno sul molo, e il capitano non sapeva che cosa fare con le lettere della gente.",
    "pt": "Quando o navio voltou ao porto não havia ninguém no cais, e o capitão não sabia o que fazer com as cartas que trazia para os vizinhos.",
    "nl": "Toen het schip naar de haven terugkwam, was er niemand op de kade, en de kapitein wist niet wat hij met de brieven moest doen.",
    "sv": "När skeppet kom tillbaka till hamnen var det ingen på kajen, och kaptenen visste inte vad han skulle göra med breven som han hade.",
    "pl": "Kiedy statek wrócił do portu, na nabrzeżu nie było nikogo, a kapitan nie wiedział, co zrobić z listami, które ma dla ludzi, ale czekał.",
    "ru": "Когда корабль вернулся в порт, на причале никого не было, и капитан не знал, что делать с письмами.",
    "ar": "عندما عادت السفينة إلى الميناء لم يكن هناك أحد على الرصيف، ولم يعرف القبطان ماذا يفعل بالرسائل.",
    "he": "כאשר הספינה חזרה לנמל לא היה איש על הרציף, והקברניט לא ידע מה לעשות עם המכתבים.",
    "hi": "जब जहाज बंदरगाह पर लौटा तो घाट पर कोई नहीं था और कप्तान को पता नहीं था कि चिट्ठियों का क्या करना है।",
}
OTHERS = {
    "Danish": "Da skibet kom tilbage til havnen, var der ingen på kajen, og kaptajnen vidste ikke, hvad han skulle gøre med brevene, som han havde.",
    "Norwegian": "Da skipet kom tilbake til havnen, var det ingen på kaien, og kapteinen visste ikke hva han skulle gjøre med brevene som han hadde.",
    "Nynorsk": "Då skipet kom attende til hamna, var det ingen på kaien, og kapteinen visste ikkje kva han skulle gjere med breva som han hadde.",
    "Icelandic": "Þegar skipið kom aftur til hafnar var enginn á bryggjunni, og skipstjórinn vissi ekki hvað hann ætti að gera við bréfin sem hann hafði.",
    "Afrikaans": "Toe die skip na die hawe terugkom, was daar niemand op die kaai nie, en die kaptein het nie geweet wat hy met die briewe moet doen nie.",
    "Luxembourgish": "Wéi d'Schëff an den Hafe zréckkoum, war keen um Quai, an de Kapitän wousst net, wat hie mat de Bréiwer maache sollt.",
    "Catalan": "Quan el vaixell va tornar al port no hi havia ningú al moll, i el capità no sabia què fer amb les cartes que portava per als veïns.",
    "Galician": "Cando o barco volveu ao porto non había ninguén no peirao, e o capitán non sabía que facer coas cartas que traía para os veciños.",
    "Occitan": "Quand lo naviri tornèt al pòrt i aviá pas degun sul mòl, e lo capitani sabiá pas qué far amb las letras que portava pels vesins.",
    "Romanian": "Când corabia s-a întors în port nu era nimeni pe chei, iar căpitanul nu știa ce să facă cu scrisorile pe care le avea pentru oameni.",
    "Czech": "Když se loď vrátila do přístavu, na nábřeží nikdo nebyl a kapitán nevěděl, co má dělat s dopisy, které měl pro lidi, ale čekal.",
    "Slovak": "Keď sa loď vrátila do prístavu, na nábreží nikto nebol a kapitán nevedel, čo má robiť s listami, ktoré mal pre ľudí, ale čakal.",
    "Croatian": "Kad se brod vratio u luku, na obali nije bilo nikoga, a kapetan nije znao što da radi s pismima koja je imao za ljude.",
    "Slovene": "Ko se je ladja vrnila v pristanišče, na pomolu ni bilo nikogar in kapitan ni vedel, kaj naj naredi s pismi, ki jih je imel.",
    "Finnish": "Kun laiva palasi satamaan, laiturilla ei ollut ketään, eikä kapteeni tiennyt, mitä hän tekisi kirjeillä, jotka hänellä oli.",
    "Hungarian": "Amikor a hajó visszatért a kikötőbe, senki sem volt a rakparton, és a kapitány nem tudta, mit tegyen a levelekkel.",
    "Turkish": "Gemi limana döndüğünde rıhtımda kimse yoktu ve kaptan elindeki mektuplarla ne yapacağını bilmiyordu, ama bekledi.",
    "Indonesian": "Ketika kapal itu kembali ke pelabuhan, tidak ada orang di dermaga, dan kapten tidak tahu apa yang harus dilakukan dengan surat itu.",
    "Ukrainian": "Коли корабель повернувся в порт, на причалі нікого не було, і капітан не знав, що робити з листами.",
    "Belarusian": "Калі карабель вярнуўся ў порт, на прычале нікога не было, і капітан не ведаў, што рабіць з лістамі.",
    "Bulgarian": "Когато корабът се върна в пристанището, на кея нямаше никого и капитанът не знаеше какво да прави с писмата.",
    "Serbian": "Када се брод вратио у луку, на обали није било никога, а капетан није знао шта да ради с писмима која је имао за људе.",
    "Macedonian": "Кога бродот се врати во пристаништето, на кејот немаше никој, а капетанот не знаеше што да прави со писмата.",
    "Kazakh": "Кеме айлаққа қайтып келгенде, жағалауда ешкім жоқ еді, ал капитан хаттармен не істерін білмеді.",
    "Persian": "وقتی کشتی به بندر برگشت هیچ کس روی اسکله نبود و ناخدا نمی‌دانست با نامه‌ها چه کند.",
    "Urdu": "جب جہاز بندرگاہ پر واپس آیا تو گھاٹ پر کوئی نہیں تھا اور کپتان کو معلوم نہیں تھا کہ خطوں کا کیا کرے۔",
    "Marathi": "जेव्हा जहाज बंदरात परत आले तेव्हा धक्क्यावर कोणीही नव्हते आणि पत्रांचे काय करायचे हे कप्तानाला माहीत नाही असे दिसते आहे.",
    "Nepali": "जहाज बन्दरगाहमा फर्कंदा घाटमा कोही थिएन र कप्तानलाई चिठीहरू के गर्ने भन्ने थाहा थिएन तर उनी पनि त्यहाँ थियो।",
}


def reasons(texts: list[str], *keep: str) -> list[str | None]:
    removed = Step(keep=keep).apply(TextBatch(texts)).removed
    return [removed.get(number) for number in range(len(texts))]


@pytest.mark.parametrize("language", LISTED)
def test_a_listed_language_is_kept(language: str) -> None:
    assert reasons([LISTED[language], LISTED[language] * 3], language) == [None, None]


@pytest.mark.parametrize("language", OTHERS)
def test_a_language_that_is_not_listed_is_unknown_and_no_neighbour(language: str) -> None:
    assert reasons([OTHERS[language], OTHERS[language] * 3], *LANGUAGES) == ["unknown", "unknown"]


def test_a_foreign_name_does_not_change_the_language_of_a_text() -> None:
    assert reasons([LISTED["ru"] * 5 + " Київ", LISTED["ar"] * 5 + " گوگل"], "ru", "ar") == [None, None]
