"""`make lock`: write requirements.lock, every package that pip would install here with the hash of its file."""

import json
import re
import subprocess
import sys

from chaos.processes import PROJECT


def main() -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report=-"]
    done = subprocess.run([*command, f"{PROJECT}[test]"], check=True, capture_output=True, text=True)
    found = {re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower(): one for one in json.loads(done.stdout)["install"]}
    hashes = {name: one["download_info"].get("archive_info", {}).get("hashes") for name, one in found.items()}
    lines = [
        f"{name}=={found[name]['metadata']['version']} --hash=sha256:{hashed['sha256']}\n"
        for name, hashed in sorted(hashes.items())
        if hashed  # all but ourselves
    ]
    version, system = ".".join(map(str, sys.version_info[:2])), sys.platform
    head = f"# Made by `make lock` with Python {version} on {system}: pip install --require-hashes --no-deps -r FILE\n"
    (PROJECT / "requirements.lock").write_text(head + "".join(lines))


if __name__ == "__main__":
    main()
