"""Small data sets in their own public layouts, as their authors distribute them."""

import json
import random

WORDS = [
    "cat",
    "dog",
    "mat",
    "sun",
    "red",
    "blue",
    "runs",
    "sits",
    "over",
    "under",
    "small",
    "bread",
]


def sentence(draw, low=3, high=9):
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high))).capitalize()


def jsonl(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def piqa(folder, draw, count):
    for part, size in (("valid", count), ("train", 30)):
        rows = [
            {"goal": sentence(draw), "sol1": sentence(draw), "sol2": sentence(draw)}
            for _ in range(size)
        ]
        jsonl(folder / f"{part}.jsonl", rows)
        labels = "".join(f"{draw.randrange(2)}\n" for _ in rows)
        (folder / f"{part}-labels.lst").write_text(labels)


def boolq(folder, draw, count):
    for part, size in (("val", count), ("train", 30)):
        rows = [
            {"question": f"is {sentence(draw).lower()}", "passage": sentence(draw), "idx": i,
             "label": draw.random() < 0.5}
            for i in range(size)
        ]  # fmt: skip
        jsonl(folder / f"{part}.jsonl", rows)


def hellaswag(folder, draw, count):
    for part, size in (("val", count), ("train", 30)):
        rows = [
            {"ind": i, "activity_label": "Making bread", "ctx_a": f"{sentence(draw)}.",
             "ctx_b": "the cat", "ctx": "", "split": part, "split_type": "indomain",
             "label": draw.randrange(4), "source_id": f"activitynet~v_{i // 2}",
             "endings": [f"[step] {sentence(draw)} [title] {sentence(draw)}" for _ in range(4)]}
            for i in range(size)
        ]  # fmt: skip
        jsonl(folder / f"hellaswag_{part}.jsonl", rows)


def winogrande(folder, draw, count):
    for part, size in (("dev", count), ("train_xl", 30)):
        rows = [
            {"qID": f"ID{i // 2}-{1 + i % 2}", "option1": "cat", "option2": "old dog",
             "sentence": f"{sentence(draw)} because the _ {sentence(draw).lower()}.",
             "answer": str(draw.randint(1, 2))}
            for i in range(size)
        ]  # fmt: skip
        jsonl(folder / f"{part}.jsonl", rows)
        (folder / f"{part}-labels.lst").write_text("".join(f"{r['answer']}\n" for r in rows))


def anli(folder, draw, count):
    for number in (1, 2, 3):
        for part, size in (("dev", count), ("train", 30)):
            rows = [
                {"uid": f"{part}-{i}", "context": sentence(draw), "hypothesis": sentence(draw),
                 "label": draw.choice("enc"), "reason": ""}
                for i in range(size)
            ]  # fmt: skip
            jsonl(folder / f"R{number}" / f"{part}.jsonl", rows)


def hans(folder, draw, count):
    names = ["gold_label", "sentence1_parse", "sentence1", "sentence2", "pairID", "heuristic"]
    for part, size in (("evaluation", count), ("train", 30)):
        lines = ["\t".join(names)]
        for i in range(size):
            label = draw.choice(("entailment", "non-entailment"))
            kind = ("lexical_overlap", "subsequence", "constituent")[i * 3 // size]
            texts = f"{sentence(draw)}.\t{sentence(draw)}."
            lines.append(f"{label}\t( )\t{texts}\tex{i}\t{kind}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"heuristics_{part}_set.txt").write_text("\n".join(lines) + "\n")


def wic(folder, draw, count):
    for part, size in (("val", count), ("train", 30)):
        rows = []
        for i in range(size):
            word, before = draw.choice(WORDS), sentence(draw)
            rows.append(
                {"word": word, "sentence1": f"{before} {word} {sentence(draw)}",
                 "sentence2": sentence(draw), "idx": i, "label": draw.random() < 0.5,
                 "start1": len(before) + 1, "end1": len(before) + 1 + len(word), "start2": 0,
                 "end2": 1, "version": 1.1}
            )  # fmt: skip
        jsonl(folder / f"{part}.jsonl", rows)


def lambada(folder, draw, count):
    jsonl(folder / "lambada_test.jsonl", [{"text": sentence(draw)} for _ in range(count)])
    text = "".join(sentence(draw) + "\n" for _ in range(30))
    (folder / "lambada_development_plain_text.txt").write_text(text)


def race(folder, draw, count):
    for part in ("test", "train"):
        for level in ("high", "middle"):
            (folder / part / level).mkdir(parents=True, exist_ok=True)
            for number in range(max(1, count // 4)):
                asked = 1 + number % 3
                row = {
                    "article": f"{sentence(draw)}. {sentence(draw)}.",
                    "questions": [f"{sentence(draw)}  _  ." for _ in range(asked)],
                    "options": [[sentence(draw) for _ in range(4)] for _ in range(asked)],
                    "answers": [draw.choice("ABCD") for _ in range(asked)],
                }
                (folder / part / level / f"{number}.txt").write_text(json.dumps(row))


MAKERS = {
    "piqa": piqa, "boolq": boolq, "hellaswag": hellaswag, "winogrande": winogrande, "anli": anli,
    "hans": hans, "wic": wic, "lambada": lambada, "race": race,
}  # fmt: skip
FOLDER_OF = {
    "lambada_cloze": "lambada", "lambada_cloze_gpt3": "lambada", "race_h": "race",
    "boolq_gpt3": "boolq", "piqa_gpt3": "piqa", "wic_gpt3": "wic",
    **{f"anli_r{n}{kind}": "anli" for n in (1, 2, 3) for kind in ("", "_gpt3")},
}  # fmt: skip


def make_data(folder, count=12, seed=0):
    """Writes each data set, `count` items of it, to a folder of its own."""
    for name, make in MAKERS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        make(folder / name, random.Random(seed), count)


def path_of(folder, task):
    return folder / FOLDER_OF.get(task, task)
