"""What memory cgroups leave, read from trees such as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

from kvxfer.measure.host import left_in_cgroups

MIB = 1 << 20


def group(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(f"{text}\n")


def left(own: str, root: Path) -> list[int]:
    return list(left_in_cgroups(own, root))


def test_every_group_above_counts(tmp_path: Path) -> None:
    group(tmp_path / "a", memory__max=400 * MIB, memory__current=100 * MIB, memory__stat="anon 5\ninactive_file 0")
    group(tmp_path / "a/b", memory__max="max", memory__current=90 * MIB)
    group(tmp_path / "a/b/c", memory__max=200 * MIB, memory__current=80 * MIB)
    assert left("0::/a/b/c\n", tmp_path) == [120 * MIB, 300 * MIB]
    assert left("0::/a/b\n", tmp_path) == [300 * MIB]
    assert left("0::/\n", tmp_path) == []


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    group(tmp_path, memory__max=100 * MIB, memory__current=30 * MIB)
    assert left("0::/\n", tmp_path) == [70 * MIB]
    assert left("0::/docker/0123\n", tmp_path) == [70 * MIB]
    assert left("0::/../other\n", tmp_path)[-1] == 70 * MIB


def test_pages_of_files_that_nobody_uses_are_left(tmp_path: Path) -> None:
    group(tmp_path, memory__max=100 * MIB, memory__current=90 * MIB, memory__stat=f"inactive_file {60 * MIB}")
    assert left("0::/\n", tmp_path) == [70 * MIB]


def test_the_first_version(tmp_path: Path) -> None:
    stat = f"inactive_file 7\ntotal_inactive_file {3 * MIB}"
    here = tmp_path / "memory/x"
    group(here, memory__limit_in_bytes=50 * MIB, memory__usage_in_bytes=20 * MIB, memory__stat=stat)
    group(here.parent, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=40 * MIB)
    own = "5:cpu,cpuacct:/y\n4:memory:/x\n1:name=systemd:/z\n0::/\n"
    assert left(own, tmp_path) == [33 * MIB, 9223372036854771712 - 40 * MIB]


def test_what_cannot_be_read_bounds_nothing(tmp_path: Path) -> None:
    assert left("", tmp_path) == []
    assert left("0::/gone\n4:memory:/gone\n", tmp_path) == []
    group(tmp_path, memory__max="", memory__current="what")
    assert left("0::/\n", tmp_path) == []


def test_a_group_that_is_over_its_limit_leaves_less_than_nothing(tmp_path: Path) -> None:
    group(tmp_path, memory__max=10, memory__current=30)
    assert left("0::/\n", tmp_path) == [-20]
