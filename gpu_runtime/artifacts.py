"""Content-addressed artifacts: files with a manifest, written atomically, verified when opened.

An artifact has two names. Its **content digest** is its identity and covers every byte. Its **recipe keys**
are digests of what it was made from and answer "is this built already?"; several builds of one recipe may
differ (TensorRT's do), and the key then points at the newest.

    <root>/objects/<kind>/<digest>/<files…>, manifest.json
    <root>/recipes/<kind>/<key>              the content digest that the key points at
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_runtime.errors import ArtifactError
from gpu_runtime.specs import digest_of, to_plain

MANIFEST = "manifest.json"


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one, whole: temporary name, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@dataclass(frozen=True)
class Artifact:
    """A finished artifact on disk. `metadata` is part of the content and covered by the digest."""

    kind: str
    digest: str
    folder: Path
    files: Mapping[str, str]  # name → SHA-256
    metadata: Mapping[str, Any]

    @property
    def uri(self) -> str:
        return self.folder.as_posix()

    def file(self, name: str) -> Path:
        if name not in self.files:
            raise ArtifactError(
                "has no such file",
                stage="artifacts",
                item=f"{self.kind}/{self.digest[:12]}",
                expected=", ".join(sorted(self.files)),
                got=name,
            )
        return self.folder / name

    @property
    def nbytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in (*self.files, MANIFEST))


@dataclass
class Draft:
    """An artifact being written: put files into `folder`, set `metadata`; `artifact` exists after the `with`."""

    folder: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    artifact: Artifact | None = None

    def finished(self) -> Artifact:
        assert self.artifact is not None, "the draft's `with` block has not ended"
        return self.artifact


class ArtifactStore:
    """A folder of artifacts. Safe for several writers: objects are renamed into place, never edited."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    @contextlib.contextmanager
    def draft(self, kind: str, recipe_keys: Sequence[str]) -> Iterator[Draft]:
        """Write an artifact of `kind`; published under its content digest when the block ends without error."""
        workspace = self.root / "drafts" / uuid.uuid4().hex
        workspace.mkdir(parents=True)
        draft = Draft(workspace)
        try:
            yield draft
            draft.artifact = self._publish(kind, draft, recipe_keys)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)

    def _publish(self, kind: str, draft: Draft, recipe_keys: Sequence[str]) -> Artifact:
        paths = sorted(p for p in draft.folder.rglob("*") if p.is_file())
        files = {p.relative_to(draft.folder).as_posix(): file_digest(p) for p in paths}
        content = {"kind": kind, "files": files, "metadata": to_plain(draft.metadata)}
        digest = digest_of(content)
        write_atomically(draft.folder / MANIFEST, json.dumps(content, indent=1, sort_keys=True).encode())
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        final = self.root / "objects" / kind / digest
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(draft.folder, final)
        except OSError:
            if not final.is_dir():
                raise
            # The same bytes are there already; another writer was first. A damaged copy is replaced.
            try:
                self.get(kind, digest)
            except ArtifactError:
                aside = self.root / "drafts" / uuid.uuid4().hex
                os.rename(final, aside)
                os.rename(draft.folder, final)
                shutil.rmtree(aside, ignore_errors=True)
        self.point(kind, recipe_keys, digest)
        return Artifact(kind, digest, final, files, content["metadata"])

    def point(self, kind: str, recipe_keys: Sequence[str], digest: str) -> None:
        """Make the recipe keys name that artifact from now on."""
        for key in recipe_keys:
            write_atomically(self.root / "recipes" / kind / key, digest.encode())

    def get(self, kind: str, digest: str) -> Artifact:
        """The artifact of that content digest, every byte checked against it."""
        folder = self.root / "objects" / kind / digest
        item = f"{kind}/{digest[:12]}"
        next_step = f"materialize the asset that makes {kind!r} again"
        try:
            content = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError as error:
            raise ArtifactError(
                "is not in the store",
                stage="artifacts",
                item=item,
                got=f"store {self.root}",
                next_step=next_step,
            ) from error
        except ValueError as error:
            raise ArtifactError("its manifest is damaged", stage="artifacts", item=item, next_step=next_step) from error
        if digest_of(content) != digest:
            raise ArtifactError(
                "its manifest is not the one its digest names",
                stage="artifacts",
                item=item,
                next_step=next_step,
            )
        for name, expected in content["files"].items():
            path = folder / name
            found = file_digest(path) if path.is_file() else "no file"
            if found != expected:
                raise ArtifactError(
                    f"file {name!r} is damaged",
                    stage="artifacts",
                    item=item,
                    expected=f"SHA-256 {expected[:12]}…",
                    got=found[:12],
                    next_step=next_step,
                )
        return Artifact(kind, digest, folder, content["files"], content["metadata"])

    def find(self, kind: str, recipe_key: str) -> Artifact | None:
        """What the recipe key points at, verified; None when nothing was built yet or its bytes are damaged."""
        try:
            digest = (self.root / "recipes" / kind / recipe_key).read_text()
        except FileNotFoundError:
            return None
        try:
            return self.get(kind, digest)
        except ArtifactError:
            return None  # built anew; `draft` replaces the damaged copy
