"""The final model on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from oomb.errors import Error
from oomb.train.errors import BadInput
from oomb.train.settings import SavingSettings


def check_hub(saving: SavingSettings) -> None:
    """Ask the hub who we are, before a run whose result would have nowhere to go.

    Raises:
        BadInput: it does not answer, knows no such token, or the name is none.
    """
    name = saving.push_to_hub
    if name is None:
        return
    from huggingface_hub import HfApi  # heavy
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
        HfApi().whoami()
    except Exception as error:  # of the hub, and of the network below
        raise BadInput(
            f"saving.push_to_hub: expected a name on the hub that this machine may write to, got "
            f"{name!r}: {_reason(error)}; hf auth login takes a token"
        ) from error


def publish(saving: SavingSettings, folder: Path) -> str | None:
    """Upload a folder as it is; the address, or None where none is asked for.

    Raises:
        oomb.Error: the hub did not take it; the folder is as it was.
    """
    name = saving.push_to_hub
    if name is None:
        return None
    from huggingface_hub import HfApi  # heavy

    hub = HfApi()
    try:
        made = hub.create_repo(name, private=saving.private, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder)
    except Exception as error:
        raise Error(
            f"saving.push_to_hub: the hub did not take the model: {_reason(error)}; it is in "
            f"{folder}, and hf upload {name} {folder} tries again"
        ) from error
    return str(made)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
