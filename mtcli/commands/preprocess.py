"""`mtcli preprocess`: text to the tokens that training reads."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mtcli.commands.options import Force, JsonOut, Resume, SkipBad, SplitOn, TextKey
from mtcli.commands.output import answer, answering, echo, print_facts

InputPaths = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        help="files, folders and globs of .txt .md .tokens .jsonl .csv .tsv (also under .gz .zst "
        ".xz .bz2) and .parquet; addresses (https:// s3:// gs:// hub:owner/name); - for standard "
        "input; stdlib for the running Python's standard library",
    ),
]
Output = Annotated[
    Path, typer.Option(metavar="PREFIX", help="write PREFIX.bin, .idx, .json and .tokenizer/")
]
TokenizerName = Annotated[
    str,
    typer.Option(
        help="a tokenizer.json, a folder with one or with vocab.json and merges.txt, "
        "a Hugging Face name, bytes, or train:N for a new byte-level BPE of N ids"
    ),
]
Format = Annotated[
    Literal["text", "jsonl", "csv", "tsv", "parquet"] | None,
    typer.Option("--format", help="format of all inputs", show_default="by their endings"),
]
MaxDocumentBytes = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**40,
        help="the largest document, in bytes of UTF-8",
        show_default="64 MiB; any size for plain text that is encoded in parts",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="worker processes that encode", show_default="one per core"),
]
AppendEod = Annotated[
    bool | None,
    typer.Option(
        "--append-eod/--no-append-eod",
        help="end every document with the tokenizer's end-of-document token",
        show_default="where it has one",
    ),
]
Sentences = Annotated[
    bool,
    typer.Option(
        "--sentences",
        help="write a document as its sentences, as BERT reads them; train:N makes WordPieces",
    ),
]


@answering
def preprocess(
    inputs: InputPaths,
    output: Output,
    tokenizer: TokenizerName,
    text_key: TextKey = "text",
    split_on: SplitOn = None,
    format: Format = None,
    max_document_bytes: MaxDocumentBytes = None,
    workers: Workers = None,
    append_eod: AppendEod = None,
    sentences: Sentences = False,
    skip_bad: SkipBad = False,
    resume: Resume = False,
    force: Force = False,
    json_out: JsonOut = None,
) -> None:
    """Turn text into token files that Megatron and mtcli train read."""
    from mtcli.core.data.preprocess import PreprocessRequest
    from mtcli.core.data.preprocess import preprocess as run
    from mtcli.core.runtime.launch import cores

    request = PreprocessRequest(
        inputs=tuple(inputs),
        output=output,
        tokenizer=tokenizer,
        text_key=text_key,
        split_on_blank=split_on == "blank",
        workers=cores() if workers is None else workers,
        append_eod=append_eod,
        skip_bad=skip_bad,
        resume=resume,
        force=force,
        format=format,
        max_document_bytes=max_document_bytes,
        sentences=sentences,
    )
    report = run(request, lambda line: echo(line, err=True))
    if answer(report, json_out):
        _show(report)


def _show(report: dict[str, Any]) -> None:
    """Prints the report as a table, then the names of the written files."""
    counts = ("documents", "tokens", "text_bytes", "empty_documents", "eod_in_text")
    rows = {name: f"{report[name]:,}" for name in counts}
    rows |= {"sentences": f"{report['sentences']:,}"} if report["sentences"] is not None else {}
    rows |= {f"skipped: {kind}": f"{count:,}" for kind, count in report["skipped"].items()}
    rows |= {f"left out: {ending}": f"{count:,}" for ending, count in report["left_out"].items()}
    rows |= {
        "vocabulary": f"{report['tokenizer']['vocab_size']:,}",
        "seconds": f"{report['seconds']:.2f}",
        "tokens/s": f"{report['tokens_per_second']:,.0f}",
    }
    print_facts(rows)
    echo("\n".join(report["outputs"]))
