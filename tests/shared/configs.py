"""The repository's configs as JSON, by name, for the C++ tests: configs.py OUT.json CONFIG.yaml... Paths in them are absolute."""

import json
import sys
from pathlib import Path

import yaml

configs = {}
for path in map(Path, sys.argv[2:]):
    config = configs[path.name] = yaml.load(path.read_text(), yaml.BaseLoader)
    for part in config.values():
        if isinstance(part, dict) and "path" in part:
            part["path"] = str((path.parent / part["path"]).resolve())
Path(sys.argv[1]).write_text(json.dumps(configs))
