"""RACE (arXiv:1704.04683), zero-shot, prompted and scored as lm-eval's race task, both levels.

One item per article: its last question. The article's earlier questions stand before it with their
answers, so the prompt shows the format without any training example. The choice with the highest
summed log-likelihood is the answer; lm-eval scores the high level, we score high and middle.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mtcli.core.data.race import LETTERS, LEVELS, Article, read_race
from mtcli.core.evaluate.encode import Encoder
from mtcli.core.evaluate.requests import Score
from mtcli.core.evaluate.tasks.task import PreparedTask, Report, TaskOptions

CLOZE = "  _  ."  # a question that ends so is read as a sentence, its answer in the gap


def prepare_race(path: Path, encoder: Encoder, options: TaskOptions) -> PreparedTask:
    """Prepares four requests per article of RACE's .txt files in a folder's high/ and middle/.

    Raises MtcliError when neither level is there, naming the file of the first bad article.
    """
    found = read_race(path, "test")
    levels = {
        level: [article for _, article in articles[: options.limit]]
        for level, articles in found.items()
    }
    requests = [
        one
        for articles in levels.values()
        for article in articles
        for one in encoder.requests(prompt(article), [" " + o for o in article.options[-1]])
    ]
    answers = {level: [a.answers[-1] for a in articles] for level, articles in levels.items()}
    return PreparedTask(sum(map(len, answers.values())), requests, partial(report_race, answers))


def prompt(article: Article) -> str:
    """The article, its earlier questions with their answers, and the last question."""
    text = f"Article: {article.text}\n\n"
    earlier = zip(article.questions, article.options, article.answers, strict=True)
    for question, options, answer in list(earlier)[:-1]:
        if question.endswith(CLOZE):
            text += question[:-5] + options[answer] + "\n"
        else:
            text += f"Question: {question}\nAnswer: {options[answer]}\n"
    return text + article.questions[-1]


def report_race(answers: dict[str, list[int]], scores: Sequence[Score]) -> Report:
    """Reports accuracy over all items and per level (None for a level that is not there)."""
    correct, start = {}, 0
    for level, right in answers.items():
        correct[level] = 0
        for answer in right:
            choices = [score.logprob for score in scores[start : start + len(LETTERS)]]
            correct[level] += choices.index(max(choices)) == answer
            start += len(LETTERS)
    total = sum(map(len, answers.values()))
    report: Report = {"accuracy": sum(correct.values()) / total}
    for level in LEVELS:
        report[level] = correct[level] / len(answers[level]) if level in answers else None
    report |= {"correct": sum(correct.values()), "total": total}
    return report | {f"{level}_total": len(answers.get(level, ())) for level in LEVELS}
