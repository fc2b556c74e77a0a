"""Requests that draw on the whole text are told from questions, in the languages of `asking/whole.tsv`, and a policy
that keeps a part of the text warns of them."""

import warnings
from pathlib import Path

import pytest
import tiny
import torch
from templates import QWEN

import kvevict
import kvevict.cautions
from kvevict.asking import request
from kvevict.asking.request import languages, request_of

TEXT = "The harbour opens at seven. The lantern is lit at nine, says the old man by the door. " * 9

WHOLE = dict(
    english=[
        "Summarize the text above in five sentences.", "Can you write a one-page summary of all news?", "TL;DR",
        "Please list all the people in it.", "Translate this into German.", "Rewrite the story for children.",
        "Find every date in the report and say what happened then.",
    ],
    german=["Fasse den Text kurz zusammen.", "Nenne alle Personen.", "Bitte übersetze den Text ins Englische."],
    french=["Résumez ce texte en trois phrases.", "Cite toutes les personnes.", "Traduis le texte en anglais."],
    spanish=["Resume el texto en tres frases.", "Enumera todas las personas.", "Traduce el texto al inglés."],
    portuguese=["Resuma o texto em três frases.", "Liste todas as pessoas.", "Traduza o texto para o inglês."],
    italian=["Riassumi il testo in tre frasi.", "Elenca tutte le persone.", "Traduci il testo in inglese."],
    romanian=["Rezumă textul în trei propoziții.", "Enumeră toate persoanele.", "Traduce textul în engleză."],
    russian=["Напиши краткое содержание текста.", "Перечисли всех людей.", "Переведи текст на английский."],
    greek=["Γράψε μια περίληψη του κειμένου.", "Απαρίθμησε όλα τα πρόσωπα.", "Μετάφρασε το κείμενο στα αγγλικά."],
    turkish=["Metni üç cümleyle özetle.", "Tüm kişileri listele.", "Metni İngilizceye çevir."],
    vietnamese=["Hãy tóm tắt văn bản.", "Liệt kê tất cả nhân vật.", "Dịch văn bản sang tiếng Anh."],
    arabic=["لخص النص في ثلاث جمل.", "اذكر جميع الأشخاص.", "ترجم النص إلى الإنجليزية."],
    hindi=["पाठ का सारांश लिखिए।", "सभी लोगों के नाम बताइए।", "पाठ का अंग्रेज़ी में अनुवाद कीजिए।"],
    urdu=["متن کا خلاصہ لکھیں۔", "تمام لوگوں کے نام بتائیں۔", "متن کا انگریزی میں ترجمہ کریں۔"],
    chinese=["请总结以上文章。", "请列出所有人物。", "请把这篇文章翻译成英文。", "写一份摘要。"],
    japanese=["文章を要約してください。", "人物をすべて挙げてください。", "この文章を英語に翻訳してください。"],
    korean=["글을 세 문장으로 요약해 줘.", "모든 인물을 나열해 줘.", "본문을 영어로 번역해 줘."],
    thai=["สรุปข้อความนี้", "บอกชื่อคนทั้งหมด", "แปลข้อความเป็นภาษาอังกฤษ"],
)  # fmt: skip
PART = dict(
    english=[
        "When is the lantern lit?", "Who wrote the summary?", "What does all this cost?", "Is every house listed?",
        "Which text does he read?", "Translate this word.", "Who gave an overview of the plan?", "Why?", "",
    ],
    german=["Wann wird die Laterne angezündet?", "Wer fasste den Plan?", "Was kostet alles?"],
    french=["Quand allume-t-on la lanterne ?", "Qui a écrit le texte ?", "Tous sont-ils venus ?"],
    spanish=["¿Cuándo se enciende la lámpara?", "¿Quién escribió el texto?", "¿Cuánto cuesta todo?"],
    portuguese=["Quando se acende a lanterna?", "Quem escreveu o texto?", "Quanto custa tudo?"],
    italian=["Quando si accende la lanterna?", "Chi ha scritto il testo?", "Quanto costa tutto?"],
    romanian=["Când se aprinde felinarul?", "Cine a scris textul?", "Cât costă toate?"],
    russian=["Когда зажигают фонарь?", "Кто написал текст?", "Сколько всё это стоит?"],
    greek=["Πότε ανάβει ο λύχνος;", "Ποιος το είπε;", "Πόσο κοστίζουν όλα;"],
    turkish=["Fener ne zaman yakılıyor?", "Metin kimin?", "Her şey ne kadar?"],
    vietnamese=["Đèn được thắp khi nào?", "Ai là người viết?", "Tất cả giá bao nhiêu?"],
    arabic=["متى يضاء المصباح؟", "من هو الرجل؟", "كم ثمن كل ذلك؟"],
    hindi=["दीपक कब जलाया जाता है?", "वह आदमी कौन है?", "घर कहाँ है?"],
    urdu=["چراغ کب جلتا ہے؟", "وہ آدمی کون ہے؟", "گھر کہاں ہے؟"],
    chinese=["灯什么时候点亮？", "这个人是谁？", "请确定给定的摘要出自哪一段。"],
    japanese=["灯は何時に？", "その人は誰ですか？", "すべていくらですか？"],
    korean=["등은 언제 켜지나요?", "그 사람은 누구인가요?", "모두 얼마인가요?"],
    thai=["ตะเกียงจุดกี่โมง", "ใครเป็นคนพูด", "ท่าเรือเปิดเมื่อไร"],
)  # fmt: skip


def each(table):
    return [
        pytest.param(line, id=f"{language}-{n}") for language, lines in table.items() for n, line in enumerate(lines)
    ]


@pytest.mark.parametrize("asked", each(WHOLE))
def test_requests_of_the_whole_text(asked):
    """Alone, before a text and after one."""
    assert request_of(asked) == asked
    assert request_of(f"{TEXT}\n\n{asked}") == request_of(f"{asked}\n\n{TEXT}") == asked


@pytest.mark.parametrize("asked", each(PART))
def test_other_requests(asked):
    assert request_of(asked) is request_of(f"{TEXT}\n\n{asked}") is request_of(f"{asked}\n\n{TEXT}") is None


def test_every_language_has_examples():
    file = Path(request.__file__).with_name("whole.tsv")
    named = [line.split("\t")[0] for line in file.read_text("utf-8").splitlines()[1:]]
    assert named == [*WHOLE] == [*PART] and len(languages()) == len(named)


def test_the_middle_of_a_text_requests_nothing():
    inside = f"{TEXT}\nSummarize the text above in five sentences.\n{TEXT}"
    assert request_of(f"{inside}\n\nWho says it?") is None
    assert request_of(f"{inside}\n\nList all of them.") == "List all of them."


@pytest.fixture(scope="module")
def net():
    return tiny.model(vocab_size=258, bos_token_id=None, pad_token_id=None)


@pytest.fixture
def told(net, monkeypatch):
    """The warnings about whole texts while a model reads a turn under a policy."""
    monkeypatch.setattr(kvevict.cautions, "_given", set())
    words = tiny.byte_tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = QWEN

    def read(turn, policy="take+edie", times=1, **options):
        ids = torch.tensor(
            [
                words.apply_chat_template(
                    [dict(role="user", content=turn)], add_generation_prompt=True, return_dict=True
                )["input_ids"]
            ]
        )
        with warnings.catch_warnings(record=True) as found, torch.no_grad():
            warnings.simplefilter("always")
            with kvevict.evicting(net, policy, tokenizer=words, **dict(budget=200) | options):
                for _ in range(times):
                    net(ids, logits_to_keep=1)
        return [str(one.message) for one in found if "draws on the whole text" in str(one.message)]

    return read


ASKED = f"{TEXT}\n\nSummarize the text above."


@pytest.mark.parametrize("policy", ["take+edie", "snapkv", "h2o"])
def test_a_policy_that_keeps_a_part_warns_once(policy, told):
    (said,) = told(ASKED, policy, times=2)
    assert said.startswith("'Summarize the text above.' draws on the whole text, and each head keeps 200 of its ")
    assert "recall=True" in said and "larger budget" in said
    assert not told(ASKED, policy) and len(told(ASKED, policy, budget=201)) == 1


@pytest.mark.parametrize("turn, options", [
    (ASKED, dict(recall=True)), (ASKED, dict(budget=4096)), (f"{TEXT}\n\nWhen is the lantern lit?", {}),
    (f"{TEXT}\n\nSummarize the text above.\n{TEXT}\n\nWho says it?", {}),
])  # fmt: skip
def test_no_warning(turn, options, told):
    assert not told(turn, **options)
