"""HIGGS and other delimited files: the numbers of `float`, and errors that name file, line and column."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torch_admm.data import hdf5
from torch_admm.data.sources import Prepared, delimited, prepare, tables
from torch_admm.errors import DataError

ROWS = np.random.default_rng(0).standard_normal((60, 28))
LABELS = np.arange(60) % 2


def lines(count: int = 60, form: str = "{:.18e}") -> list[str]:
    """As UCI writes them: 1.000000000000000000e+00,8.692932128906250000e-01,..."""
    return [",".join(form.format(v) for v in (LABELS[i], *ROWS[i])) for i in range(count)]


def zipped(path: Path, text: list[str]) -> Path:
    path.write_bytes(gzip.compress("\n".join([*text, ""]).encode()))
    return path


def higgs(folder: Path, train: Path, **options: Any) -> Prepared:
    return prepare(tables.Higgs(train=str(train), **options), folder, offline=True)


def csv(folder: Path, text: str, **options: Any) -> Prepared:
    path = folder / "rows.csv"
    path.write_text(text, encoding="utf-8")
    return prepare(tables.CSV(train=str(path), **{"label": "kind", **options}), folder)


@pytest.fixture(autouse=True)
def _nothing_half(tmp_path: Path) -> Any:
    yield
    assert not list(tmp_path.rglob("*.part"))


class TestHiggs:
    @pytest.mark.parametrize("block", [100, 1000, 1 << 20])
    def test_every_number_is_that_of_float(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
        monkeypatch.setattr(delimited.texts, "__defaults__", (0, block))
        done = higgs(tmp_path, zipped(tmp_path / "a.csv.gz", lines()), test_rows=7)
        (x, y), (test_x, test_y) = (hdf5.read(path) for path in done.parts)
        np.testing.assert_array_equal(np.concatenate([x, test_x]), ROWS.astype(np.float32))
        np.testing.assert_array_equal(np.concatenate([y, test_y]), LABELS)
        assert len(test_y) == 7
        assert done.train.classes == ("background", "signal")

    def test_members_one_after_the_other_and_lines_across_them(self, tmp_path: Path) -> None:
        text = "\n".join(lines()).encode()  # without a last end of line
        path = tmp_path / "a.csv.gz"
        path.write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]))
        assert higgs(tmp_path, path, test_rows=7).train.rows == 53

    def test_a_second_file_is_the_test(self, tmp_path: Path) -> None:
        train, test = zipped(tmp_path / "a.csv.gz", lines()), zipped(tmp_path / "b.csv.gz", lines(9))
        done = higgs(tmp_path, train, test=str(test))
        assert (done.train.rows, done.test.rows) == (60, 9)

    def test_the_two_files_of_a_folder_are_found_or_ambiguous(self, tmp_path: Path) -> None:
        (tmp_path / "higgs").mkdir()
        zipped(tmp_path / "higgs/HIGGS_train_60.csv.gz", lines())
        zipped(tmp_path / "higgs/HIGGS_test_9.csv.gz", lines(9))
        assert prepare(tables.Higgs(), tmp_path, offline=True).test.rows == 9
        zipped(tmp_path / "higgs/HIGGS_test_8.csv.gz", lines(8))
        with pytest.raises(DataError, match=r"several files HIGGS_train\* or HIGGS_test\*; name two by --train and"):
            prepare(tables.Higgs(), tmp_path, offline=True)

    def test_without_the_file_and_the_network_a_sentence_says_what_to_put_where(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"higgs/HIGGS.csv.gz does not exist; get https://\S+HIGGS.csv.gz and put"):
            prepare(tables.Higgs(), tmp_path, offline=True)

    @pytest.mark.parametrize("part", [0.0, 0.003, 0.3, 0.7, 0.99, 0.9999])
    def test_a_gzip_file_that_is_cut_off(self, tmp_path: Path, part: float) -> None:
        path = zipped(tmp_path / "a.csv.gz", lines())
        whole = path.read_bytes()
        path.write_bytes(whole[: max(3, int(part * len(whole)))])
        with pytest.raises(DataError, match=r"a.csv.gz, after line \d+: the gzip file is cut off or damaged"):
            higgs(tmp_path, path, test_rows=7)
        assert not list(tmp_path.rglob("*.h5"))

    @pytest.mark.parametrize("position", [-1, -6, 300, 2000])
    def test_a_flipped_byte_is_noticed(self, tmp_path: Path, position: int) -> None:
        path = zipped(tmp_path / "a.csv.gz", lines())
        data = bytearray(path.read_bytes())
        data[position] ^= 16
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"a.csv.gz"):
            higgs(tmp_path, path, test_rows=7)
        assert not list(tmp_path.rglob("*.h5"))

    def test_too_few_rows_for_the_test(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"has 60 rows; 500,000 for the test \(--test-rows\) leave none to train"):
            higgs(tmp_path, zipped(tmp_path / "a.csv.gz", lines()))
        with pytest.raises(DataError, match=r"no rows for train.h5, 60 in all"):
            higgs(tmp_path, tmp_path / "a.csv.gz", test_rows=60)


BAD_LINES: dict[str, tuple[str, str]] = {
    "missing column": (",".join(["1"] * 28), r"line 41 has 28 columns; 29 are expected"),
    "extra column": (",".join(["1"] * 30), r"line 41 has 30 columns; 29 are expected"),
    "text": ("1,x" + ",1" * 27, r"line 41, column 2: 'x' is not a number"),
    "nothing": ("1" + ",1" * 27 + ",", r"line 41, column 29: '' is not a number"),
    "underscore": ("1,1_0" + ",1" * 27, r"line 41, column 2: '1_0' is not a number"),
    "nan": ("1,1,nan" + ",1" * 26, r"line 41, column 3: 'nan' is not finite"),
    "inf": ("1,1,-inf" + ",1" * 26, r"line 41, column 3: '-inf' is not finite"),
    "too large": ("1,1,1e39" + ",1" * 26, r"line 41, column 3: '1e39' does not fit a 32-bit float"),
    "just too large": ("1,1,3.4028235677973366e38" + ",1" * 26, r"line 41, column 3: '3.4.*' does not fit a 32-bit"),
    "label": ("2" + ",1" * 28, r"line 41, column 1: label '2' is none of the classes 0, 1"),
    "half a label": ("0.5" + ",1" * 28, r"line 41, column 1: label '0.5' is none of the classes 0, 1"),
    "header": ("label" + ",f" * 28, r"line 41, column 2: 'f' is not a number"),
    "quote": ('1,"1' + ",1" * 27, r"line 41: unexpected end of data; every row must be one line"),
    "not text": ("1,\udcff" + ",1" * 27, r"line 41: byte 0xff is not UTF-8 text"),
}


@pytest.mark.parametrize("block", [100, 1 << 20])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block: int) -> None:
    monkeypatch.setattr(delimited.texts, "__defaults__", (0, block))
    line, message = BAD_LINES[name]
    text = [*lines(30), *lines(10), line, *lines(5)]
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress("\n".join(text).encode(errors="surrogateescape")))
    with pytest.raises(DataError, match=f"a.csv.gz, {message}"):
        higgs(tmp_path, path, test_rows=3)
    assert not list(tmp_path.rglob("*.h5"))


def test_the_largest_number_fits(tmp_path: Path) -> None:
    """What is rounded to the largest float32 is as good as that."""
    text = [*lines(), "1,3.4028235677973362e38" + ",1" * 27]
    x, _ = hdf5.read(higgs(tmp_path, zipped(tmp_path / "a.csv.gz", text), test_rows=1).parts.test)
    assert x[0, 0] == np.finfo(np.float32).max


def test_a_file_that_is_no_text_is_given_up_early(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(bytes(range(11, 256)) * 40)
    with pytest.raises(DataError, match=r"a.csv, line 1 is longer than [\d,]+ bytes; is this a text file"):
        list(delimited.texts(path, size=256))


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"a.csv.gz has 0 rows; 3 for the test"):
        higgs(tmp_path, tmp_path / "a.csv.gz", test_rows=3)
    with pytest.raises(DataError, match=r"rows.csv, line 1 is empty; a header or a row is expected"):
        csv(tmp_path, "")


IRIS = "width,kind,length\n" + "\n".join(f"{i}.5,{'abc'[i % 3]},{-i}" for i in range(40))


class TestCSV:
    def test_classes_are_those_in_the_file(self, tmp_path: Path) -> None:
        done = csv(tmp_path, IRIS, test_rows=4)
        assert done.train.classes == ("a", "b", "c")
        x, y = hdf5.read(done.parts.train)
        np.testing.assert_array_equal(x[:2], [[0.5, 0], [1.5, -1]])
        np.testing.assert_array_equal(y[:4], [0, 1, 2, 0])

    def test_classes_may_be_given_in_their_order(self, tmp_path: Path) -> None:
        done = csv(tmp_path, IRIS, classes=("c", "b", "a"), test_rows=4)
        np.testing.assert_array_equal(hdf5.read(done.parts.train)[1][:3], [2, 1, 0])

    def test_classes_that_are_numbers_are_ordered_and_equal_by_value(self, tmp_path: Path) -> None:
        done = csv(tmp_path, "10,1\n9,2\n9.0,3\n1e1,4", label="1", test_rows=1)
        assert done.train.classes == ("9", "10")
        np.testing.assert_array_equal(hdf5.read(done.parts.train)[1], [1, 0, 0])

    def test_a_number_to_predict(self, tmp_path: Path) -> None:
        done = csv(tmp_path, IRIS, label="length", drop=("kind",), regression=True, test_rows=4)
        assert done.train.classes is None
        np.testing.assert_array_equal(hdf5.read(done.parts.train)[1][:3], [0, -1, -2])

    @pytest.mark.parametrize(
        ("text", "options"),
        [
            ("\ufeff" + IRIS, {}),
            (IRIS.replace("\n", "\r\n"), {}),
            (IRIS.replace("\n", "\n\n") + "\n\n", {}),
            (IRIS.replace(",", ";"), {"delimiter": ";"}),
            (IRIS.replace(",", "\t"), {"delimiter": "\\t"}),
            (IRIS.replace("\n1.5", '\n"1.5"').replace("\n2.5", "\n +2.5 "), {}),
            (IRIS.partition("\n")[2], {"label": "2"}),
        ],
    )
    def test_ways_to_write_the_same(self, tmp_path: Path, text: str, options: dict[str, Any]) -> None:
        x, y = hdf5.read(csv(tmp_path, text, **options, test_rows=4).parts.train)
        np.testing.assert_array_equal(x, [[i + 0.5, -i] for i in range(36)])
        np.testing.assert_array_equal(y, np.arange(36) % 3)

    def test_the_first_line_is_what_it_is_said_to_be(self, tmp_path: Path) -> None:
        assert csv(tmp_path, "2,1\n" + "a,1\n" * 9, label="1", header="yes", test_rows=2).train.rows == 7
        path = tmp_path / "rows.csv"
        path.write_text(IRIS, encoding="utf-8")
        with pytest.raises(DataError, match=r"rows.csv, line 1, column 1: 'width' is not a number"):
            prepare(tables.CSV(train=str(path), label="2", header="no"), tmp_path, name="b")

    def test_the_test_is_drawn_by_seed_whatever_the_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn = []
        for block, seed in ((1 << 20, 0), (64, 0), (1 << 20, 1)):
            monkeypatch.setattr(delimited.texts, "__defaults__", (0, block))
            folder = tmp_path / f"{block}_{seed}"
            folder.mkdir()
            drawn.append(hdf5.read(csv(folder, IRIS, test_fraction=0.3, seed=seed).parts.test)[0])
        np.testing.assert_array_equal(drawn[0], drawn[1])
        assert drawn[0].shape != drawn[2].shape or (drawn[0] != drawn[2]).any()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"label": "colour"}, r"--label is 'colour'; \S+rows.csv has the columns width, kind, length, or 1 to 3"),
            ({"label": "4"}, r"--label is '4'; \S+ has the columns"),
            ({"drop": ("9",)}, r"--drop is '9'; \S+ has the columns"),
            ({"drop": ("width", "length")}, r"line 1 leaves no column beside the label; is --delimiter ',' right"),
            ({"delimiter": "ab"}, r"--delimiter is 'ab'; one character is expected"),
            ({"label": None}, r"csv needs --train FILE and --label COLUMN"),
            ({"classes": ("a",), "regression": True}, r"--classes and --regression exclude each other"),
            ({"test": "x", "test_rows": 4}, r"--test, --test-rows and --test-fraction exclude each other"),
            ({"test_rows": 0}, r"--test-rows is 0; a whole number of at least 1"),
            ({"test_fraction": 1.5}, r"--test-fraction is 1.5; a number between 0 and 1"),
            ({"test": "nowhere.csv"}, r"nowhere.csv does not exist, or is no file"),
            ({"regression": True}, r"line 2, column 2 \(kind\): 'a' is not a number"),
            ({"classes": ("a", "b")}, r"line 4, column 2 \(kind\): label 'c' is none of the classes a, b"),
            ({"label": "width"}, r"line 2, column 2 \(kind\): 'a' is not a number"),
        ],
    )
    def test_bad_options(self, tmp_path: Path, options: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=message):
            csv(tmp_path, IRIS, **options)
        assert not list(tmp_path.rglob("*.h5"))

    def test_a_test_file_of_other_columns(self, tmp_path: Path) -> None:
        other = tmp_path / "other.csv"
        other.write_text(IRIS.replace("width", "depth", 1), encoding="utf-8")
        with pytest.raises(DataError, match=r"other.csv, line 1: its columns are not those of \S+rows.csv"):
            csv(tmp_path, IRIS, test=str(other))

    def test_too_many_classes_to_be_classes(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"column 1 has more than 1,000 different values; --regression if it is"):
            csv(tmp_path, "\n".join(f"{i},1" for i in range(1001)), label="1")


def test_missing_packages_are_named_with_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'pyarrow is needed here \(.*\): pip install "torch-admm\[data\]"'):
        csv(tmp_path, IRIS)


def test_a_file_that_cannot_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def read(self, size: int) -> bytes:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(delimited, "_opened", lambda raw: Broken())
    with pytest.raises(OSError, match="Input/output error"):
        higgs(tmp_path, zipped(tmp_path / "a.csv.gz", lines()))
