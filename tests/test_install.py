"""The name that is installed, hints that work for the way it was, and a namesake's files."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fa4.base.install import DISTRIBUTION, REINSTALL, refuse_mixed_files
from fa4.commands import doctor
from tests.installed import EXTRAS, PYPROJECT, ROOT, call, copy_project

HINT = re.compile(r"pip install ([^`\n\"]+)")

# What our hints name and no extra needs.
ELSEWHERE = {
    "flash-attn", "flash-attn-4", "flashinfer-python", "nvidia-cuda-cccl", "nvidia-cuda-crt",
    "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm", "nvidia-cuda-runtime",
    "nvidia-cutlass-dsl-libs-cu13", "nvidia-nvvm", "triton", "xformers",
}  # fmt: skip


def hinted(text: str) -> Iterator[str]:
    """The requirements of every `pip install` in a text, without versions; placeholders apart."""
    for arguments in HINT.findall(text):
        for word in re.split(r"[\s'&()]+", re.sub(r"{[^}]*}", "{", arguments)):
            if word and not word.startswith(("-", "{", "pip", "install")):
                yield re.split(r"[<>=,:{]", word)[0].rstrip(".;")


def foreign(text: str, pyproject: str) -> list[str]:
    """What hints name that is no package of pyproject.toml or ELSEWHERE, nor an extra of a
    checkout; our own name is on no index."""
    known = {f".[{extra}]" for extra in EXTRAS} | ELSEWHERE
    known |= set(re.findall(r'"([A-Za-z][\w.-]*)', pyproject)) - {"fa4", DISTRIBUTION}
    return [name for name in hinted(text) if name not in known]


def other_versions(text: str, pyproject: str) -> list[str]:
    """Requirements in quotes that a text tells pip, and that pyproject.toml does not have so."""
    told = [
        word for hint in HINT.findall(text) for word in re.findall(r"'([\w-]+[<>=][^']*)'", hint)
    ]
    return [requirement for requirement in told if f'"{requirement}"' not in pyproject]


def source_files() -> list[Path]:
    """The files whose hints a user sees."""
    found = [*(ROOT / "fa4").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    return [path for path in found if path != ROOT / "fa4/base/install.py"]


def test_hints_name_what_exists() -> None:
    """No hint names the distribution of somebody else, or an extra that there is not."""
    texts = {path: path.read_text(encoding="utf-8") for path in source_files()}
    assert sum(len(list(hinted(text))) for text in texts.values()) > 10
    assert {str(p): foreign(t, PYPROJECT) for p, t in texts.items() if foreign(t, PYPROJECT)} == {}


def test_hints_ask_for_the_versions_of_the_project() -> None:
    """Where one says them; those of the extras, word for word."""
    texts = [path.read_text(encoding="utf-8") for path in source_files()]
    assert [wrong for text in texts for wrong in other_versions(text, PYPROJECT)] == []
    assert other_versions("pip install 'torch>=2.0' hypothesis", PYPROJECT) == ["torch>=2.0"]


@pytest.mark.parametrize("name", ["fa4", "fa4[test]", "fa4-lab[test]", ".[tests]", "matplotlyb"])
def test_a_wrong_hint_is_found(name: str) -> None:
    assert foreign(f"needs it: pip install '{name}' matplotlib", PYPROJECT) == [name]


def test_a_command_without_its_package_names_it() -> None:
    """`fa4 verify` where hypothesis is missing: the whole line, and what it says pip would take."""
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import fa4_lab; sys.argv = ['fa4', 'verify', '--list']; fa4_lab.main()"
    )
    done = call(sys.executable, "-c", code, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.endswith(" needs hypothesis: pip install 'hypothesis>=6.112'\n")


def leave_record(site: Path, distribution: str, *files: str) -> None:
    folder = site / f"{distribution}.dist-info"
    folder.mkdir()
    (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_a_namesake_beside_this_package_does_no_harm(tmp_path: Path) -> None:
    """flash-attn-4 under its old name brings flash_attn only; ours and an editable one as well."""
    (tmp_path / "fa4").mkdir()
    leave_record(tmp_path, "fa4-4.0.0b3", "flash_attn/cute/__init__.py")
    leave_record(tmp_path, "fa4-0.1.0", "__editable__.fa4-0.1.0.pth", "../../../bin/fa4")
    leave_record(tmp_path, "fa4_lab-0.1.0", "fa4/__init__.py")
    refuse_mixed_files(tmp_path / "fa4")


def test_a_namesake_with_files_here_is_refused(tmp_path: Path) -> None:
    leave_record(tmp_path, "fa4-9.1", "fa4-9.1.dist-info/METADATA", "fa4/interface.py")
    with pytest.raises(ImportError, match=r"fa4 9\.1, which is not fa4-lab.*pip uninstall -y fa4"):
        refuse_mixed_files(tmp_path / "fa4")


def test_doctor_names_the_namesake(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"fa4": "4.0.0b3"}
    monkeypatch.setattr(doctor, "version_of", lambda name: found.get(name, "1.0"))
    report = doctor.diagnose()
    assert report["namesake"] == "4.0.0b3"
    assert "fa4 4.0.0b3 is installed too; it is not this package" in str(doctor.render(report))
    assert "installed too" not in str(doctor.render({**report, "namesake": None}))


def test_module_and_start_run_the_command(tmp_path: Path) -> None:
    """`python -m fa4` is `fa4`; so is the function that the installed script calls."""
    for start in (("-m", "fa4"), ("-c", "import fa4_lab; fa4_lab.main()")):
        done = call(sys.executable, *start, "predict", "--help", PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Usage: fa4 predict ")


def test_completion_in_the_shell(tmp_path: Path) -> None:
    """What `--install-completion` writes asks the command, which completes names and options."""
    module = (sys.executable, "-m", "fa4")
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "SHELL": "/bin/bash",
                   "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # fmt: skip
    assert call(*module, "--install-completion", "bash", **environment).returncode == 0
    script = (tmp_path / ".bash_completions/fa4.sh").read_text()
    assert "_FA4_COMPLETE=complete_bash $1" in script
    for typed, completed in (("fa4 ver", ["verify"]), ("fa4 predict --seq", ["--seqlen"])):
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        done = call(*module, _FA4_COMPLETE="complete_bash", **words, **environment)
        assert done.stdout.split()[:1] == completed, done.stderr


def test_what_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    """A namesake's files, and a package overwritten by one: exit code 2, no traceback."""
    site = copy_project(tmp_path / "site")
    (site / "pyproject.toml").unlink()
    # Without the finder of an editable installation, which would find what is missing.
    start = (
        sys.executable, "-c",
        "import sys; sys.meta_path = [x for x in sys.meta_path if 'Editable' not in repr(x)]; "
        "import fa4_lab; fa4_lab.main()", "machines",
    )  # fmt: skip
    assert call(*start, PYTHONPATH=str(site)).returncode == 0
    leave_record(site, "fa4-9.1", "fa4/interface.py")
    done = call(*start, PYTHONPATH=str(site))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("fa4: error: the distribution fa4 9.1, which is not fa4-lab, ")
    imported = call(sys.executable, "-c", "import fa4", PYTHONPATH=str(site))
    assert imported.stderr.splitlines()[-1].startswith("ImportError: the distribution fa4 9.1")
    shutil.rmtree(site / "fa4")
    (site / "fa4").mkdir()
    (site / "fa4/__init__.py").write_text("")
    done = call(*start, PYTHONPATH=str(site))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.endswith(f": {REINSTALL}\n")
