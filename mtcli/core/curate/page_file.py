"""Reads an HTML file, one page, as a document."""

from pathlib import Path

from mtcli.core.config.errors import wrong
from mtcli.core.curate.documents import BadRecord, Document, made_key
from mtcli.core.curate.page_limits import MAX_BYTES, require_readable
from mtcli.core.data.compressed import DAMAGE, pieces
from mtcli.core.data.sources import SourceFile
from mtcli.core.runtime.process_pool import Progress
from mtcli.core.runtime.remote import open_input


def read_page(source: SourceFile, name: str, progress: Progress) -> Document | BadRecord:
    """Returns the page of a file, compressed or not, whose source is the name of its folder.

    A page beyond the limits of page_limits.py and a damaged file are bad records. Raises MtcliError
    for a file that cannot be opened.
    """
    content = bytearray()
    try:
        with open_input(source.path, source.size) as file:
            for piece in pieces(file, source.compression, source.path):
                content += piece
                if len(content) > MAX_BYTES:
                    return BadRecord(name, 1, f"a page of more than {MAX_BYTES:,} bytes")
        require_readable(html := bytes(content))
    except ValueError as error:
        return BadRecord(name, 1, str(error))
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise wrong(
                f"{source.path} cannot be read: {error.strerror}", "copy it again"
            ) from None
        return BadRecord(name, 0, f"the file is damaged: {error}")
    finally:
        progress(source.size)
    return Document(made_key(name, 1), Path(source.path).parent.name, "", len(html), html=html)
