"""Artifacts: whole or not there, found by recipe, and every byte checked against the digest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_runtime.artifacts import Artifact, ArtifactStore, write_atomically
from gpu_runtime.errors import ArtifactError

RECIPE = "recipe"


def make(store: ArtifactStore, data: bytes = b"weights" * 100, recipe: str = RECIPE, **metadata: Any) -> Artifact:
    with store.draft("model", [recipe]) as draft:
        (draft.folder / "deep").mkdir()
        (draft.folder / "deep" / "model.bin").write_bytes(data)
        draft.metadata = metadata
    return draft.finished()


def flip_a_byte(folder: Path) -> None:
    path = folder / "deep" / "model.bin"
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = folder / "deep" / "model.bin"
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    (folder / "deep" / "model.bin").unlink()


def cut_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:20])


def edit_the_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"rows": 5', '"rows": 6'))


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


DAMAGES = [flip_a_byte, truncate, lose_a_file, cut_the_manifest, edit_the_manifest, lose_the_manifest]


def test_an_artifact_comes_back_by_its_digest_and_by_its_recipe(store: ArtifactStore) -> None:
    made = make(store, rows=5)
    assert store.get("model", made.digest) == made == store.find("model", RECIPE)
    assert made.file("deep/model.bin").read_bytes() == b"weights" * 100
    assert made.metadata == {"rows": 5}


def test_the_digest_covers_bytes_and_metadata(store: ArtifactStore) -> None:
    digests = {make(store, rows=5).digest, make(store, rows=6).digest, make(store, b"other", rows=5).digest}
    assert len(digests) == 3


def test_what_was_never_made_is_an_error_by_digest_and_nothing_by_recipe(store: ArtifactStore) -> None:
    assert store.find("model", RECIPE) is None
    with pytest.raises(ArtifactError, match="materialize the asset that makes 'model'"):
        store.get("model", "0" * 64)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artifact_is_never_handed_out(store: ArtifactStore, damage: Callable[[Path], None]) -> None:
    made = make(store, rows=5)
    damage(made.folder)
    with pytest.raises(ArtifactError):
        store.get("model", made.digest)
    assert store.find("model", RECIPE) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_making_a_damaged_artifact_again_repairs_it(store: ArtifactStore, damage: Callable[[Path], None]) -> None:
    made = make(store, rows=5)
    damage(made.folder)
    again = make(store, rows=5)
    assert again.digest == made.digest
    assert store.get("model", made.digest).file("deep/model.bin").read_bytes() == b"weights" * 100


def test_an_exception_in_the_draft_leaves_nothing(store: ArtifactStore) -> None:
    with pytest.raises(ZeroDivisionError), store.draft("model", [RECIPE]) as draft:
        (draft.folder / "half.bin").write_bytes(b"half")
        raise ZeroDivisionError
    assert [path for path in store.root.rglob("*") if path.is_file()] == []
    assert store.find("model", RECIPE) is None


def test_a_finished_draft_leaves_no_workspace(store: ArtifactStore) -> None:
    make(store)
    make(store)  # the same bytes: the second workspace is not needed
    assert list((store.root / "drafts").iterdir()) == []


def test_writers_of_the_same_bytes_agree(store: ArtifactStore) -> None:
    together = threading.Barrier(8)
    made: list[str] = []

    def write() -> None:
        with store.draft("model", [RECIPE]) as draft:
            (draft.folder / "model.bin").write_bytes(b"same")
            together.wait()
        made.append(draft.finished().digest)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(made)) == 1
    assert store.get("model", made[0]).files.keys() == {"model.bin"}


def test_a_recipe_points_at_its_newest_build(store: ArtifactStore) -> None:
    make(store, b"first build")
    second = make(store, b"second build")
    assert store.find("model", RECIPE) == second


def test_asking_for_a_file_that_is_not_there_names_those_that_are(store: ArtifactStore) -> None:
    with pytest.raises(ArtifactError, match=r"deep/model\.bin"):
        make(store).file("other.bin")


def test_an_atomic_write_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]
