"""Archives and forms pushed in pieces: whatever the pieces, the same files come out; and what is no
file of an adapter does not."""

import copy
import gzip
import io
import itertools
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorry.artifacts.pickled import read_tensors
from lorry.artifacts.tar import TarReader
from lorry.artifacts.unpacking import GzipReader, Unpacked, safe_path
from lorry.errors import LorryError, RequestInvalid
from lorry.server.multipart import FormReader
from tests.fixtures.uploads import tar

CONTENT = {
    "adapter_config.json": b"{}" * 700,
    "adapter_model.safetensors": bytes(range(256)) * 9,
    "empty.json": b"",
    f"{'deep/' * 6}{'n' * 120}.txt": b"x" * 513,
}


class Collected:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.name = ""

    def begin(self, name: str, size: int | None) -> None:
        self.name, self.files[name] = name, b""

    def data(self, piece: bytes) -> None:
        self.files[self.name] += piece

    def end(self) -> None:
        self.name = ""


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


CUTS = st.lists(st.integers(0, 1 << 16), max_size=12)


@given(cuts=CUTS, form=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_an_archive_in_any_pieces_gives_its_files(cuts: list[int], form: int) -> None:
    for zipped in (False, True):
        sink = Collected()
        reader = GzipReader(TarReader(sink)) if zipped else TarReader(sink)
        for piece in pieces(tar(CONTENT, "w:gz" if zipped else "w", form), cuts):
            reader.feed(piece)
        reader.close()
        assert sink.files == CONTENT


@given(cuts=CUTS)
def test_a_form_in_any_pieces_gives_its_parts(cuts: list[int]) -> None:
    lines = [
        b'--b\r\nContent-Disposition: form-data; name="files"; filename="%b"\r\n\r\n%b\r\n'
        % (name.encode(), content)
        for name, content in CONTENT.items()
    ]
    sink = Collected()
    reader = FormReader("multipart/form-data; boundary=b", sink)
    for piece in pieces(b"".join(lines) + b"--b--\r\n", cuts):
        reader.feed(piece)
    reader.close()
    assert sink.files == CONTENT


@given(data=st.binary(max_size=3000), place=st.integers(0, 5000), flip=st.integers(1, 255))
def test_damaged_archives_are_answered_and_never_a_fault(
    data: bytes, place: int, flip: int
) -> None:
    whole = bytearray(tar(CONTENT, "w", tarfile.PAX_FORMAT))
    whole[place % len(whole)] ^= flip
    for body in (data, bytes(whole), bytes(whole[:place])):
        reader = TarReader(Collected())
        try:
            reader.feed(body)
            reader.close()
        except RequestInvalid as error:
            assert error.message


@pytest.mark.parametrize("size", [2**40, 2**59])
def test_a_member_that_claims_to_be_huge_is_refused_at_once(tmp_path: Path, size: int) -> None:
    member = tarfile.TarInfo("adapter_model.safetensors")
    member.size = size
    header = member.tobuf(tarfile.PAX_FORMAT)
    reader = TarReader(Unpacked(tmp_path, 1 << 20, lambda _: None))
    with pytest.raises(LorryError, match="--max-upload-bytes"):
        reader.feed(header)


def test_a_pax_header_without_end_is_refused() -> None:
    member = tarfile.TarInfo("././@PaxHeader")
    member.type, member.size = tarfile.XHDTYPE, 1 << 30
    with pytest.raises(RequestInvalid, match="header of the archive"):
        TarReader(Collected()).feed(member.tobuf(tarfile.USTAR_FORMAT))


def test_gzip_in_several_members_is_one_archive() -> None:
    whole = tar(CONTENT, "w")
    sink = Collected()
    reader = GzipReader(TarReader(sink))
    for half in (whole[:3000], whole[3000:]):
        packed = io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb") as file:
            file.write(half)
        reader.feed(packed.getvalue())
    reader.close()
    assert sink.files == CONTENT


@pytest.mark.parametrize(
    ("name", "path"),
    [("a.json", "a.json"), ("./a/b.json", "a/b.json"), ("a//b", "a/b"), ("ä/é", "ä/é")],
)
def test_plain_names_are_taken_as_they_are(name: str, path: str) -> None:
    assert str(safe_path(name)) == path


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "/", "/a", "..", "a/..", "a/../b", "a\\b", "c:a", "a\0b", "a\nb", "a/"),
        *("x" * 256, "/".join("abcdefghi")),
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(RequestInvalid, match="file name"):
        safe_path(name)


def test_only_what_is_judged_is_kept_and_counted_before_it_is_written(tmp_path: Path) -> None:
    held: list[int] = []
    unpacked = Unpacked(tmp_path, 1000, held.append)
    for name, content in {"a/adapter_config.json": b"{}", "a/optimizer.pt": b"x" * 900}.items():
        unpacked.begin(name, None)
        unpacked.data(content)
        unpacked.end()
    assert (tmp_path / "a" / "optimizer.pt").read_bytes() == b""
    assert (unpacked.bytes, held) == (902, [2])
    assert unpacked.folder() == tmp_path / "a"
    unpacked.begin("a/more.json", None)
    with pytest.raises(LorryError, match="--max-upload-bytes"):
        unpacked.data(b"x" * 99)
    unpacked.close()


def test_a_member_with_a_sign_in_its_size_is_refused() -> None:
    member = bytearray(tarfile.TarInfo("adapter_config.json").tobuf())
    member[124:136] = b"-0000000010\0"
    member[148:156] = b"%06o\0 " % (sum(member[:148]) + 8 * 32 + sum(member[156:]))
    with pytest.raises(RequestInvalid, match="damaged"):
        TarReader(Collected()).feed(bytes(member) + b"x" * 512)


def test_a_part_with_headers_without_end_is_refused() -> None:
    """Each is short, so only all of them together are too much."""
    reader = FormReader("multipart/form-data; boundary=b", Collected())
    reader.feed(b"--b\r\n")
    with pytest.raises(RequestInvalid, match="header"):
        for number in range(1000):
            reader.feed(b"X-%d: %s\r\n" % (number, b"x" * 100))


def test_members_of_a_zip_that_share_their_bytes_are_refused() -> None:
    """What is small as it lies there would be large when each is read."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a/data.pkl", b"x" * 1000)
        first = archive.infolist()[0]
        for number in range(9):
            twin = copy.copy(first)
            twin.filename = f"a/data/{number}"
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
    with pytest.raises(RequestInvalid, match="overlap"):
        read_tensors(packed.getvalue(), None, lambda more: None)
