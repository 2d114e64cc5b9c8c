"""One module object under two names.

In the root of a checkout, `import comm` finds the folder that users know as `tkernels.comm` (and `layers` likewise).
Python would run those files a second time, and so create second copies of every class and of the runtime's state.
`alias("comm", "tkernels.comm")`, called by a package that finds itself imported as "comm", makes that name and every
name below it refer to the modules of `tkernels.comm`. An installed tkernels never calls it, so another project's
top-level `comm` is not affected.
"""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class _AliasFinder(MetaPathFinder, Loader):
    def __init__(self, name: str, target: str):
        self.name = name
        self.target = target

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(self.name + "."):
            return None
        real = self.target + fullname.removeprefix(self.name)
        try:
            found = importlib.util.find_spec(real)
        except ModuleNotFoundError:
            found = None
        return ModuleSpec(fullname, self, is_package=found.submodule_search_locations is not None) if found else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        # The import system returns the module that sys.modules holds after this call. Returning the real module from
        # create_module instead would overwrite its __spec__ with that of the alias.
        name = module.__spec__.name
        sys.modules[name] = importlib.import_module(self.target + name.removeprefix(self.name))


def alias(name: str, target: str) -> None:
    """Import the package `target`, and make `name` and its submodules other names for it and its submodules."""
    if not any(isinstance(f, _AliasFinder) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder(name, target))
    sys.modules[name] = importlib.import_module(target)
