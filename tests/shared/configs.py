"""The repository's configs as JSON, by name, for the C++ tests: configs.py OUT.json CONFIG.yaml..."""

import json
import sys
from pathlib import Path

import yaml

configs = {
    Path(name).name: yaml.load(Path(name).read_text(), yaml.BaseLoader) for name in sys.argv[2:]
}
Path(sys.argv[1]).write_text(json.dumps(configs))
