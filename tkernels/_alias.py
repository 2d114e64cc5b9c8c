"""One module object under two names.

From a checkout's root, `import comm` finds the folder that users know as `tkernels.comm` (and `layers` likewise). Left
alone, Python would run those files a second time and make second copies of every class and of the runtime's state.
`alias("comm", "tkernels.comm")`, called by a package that finds itself imported as "comm", makes that name and every
name below it stand for the modules of `tkernels.comm`. An installed tkernels never calls it, so another project's
top-level `comm` is not touched.
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
        # The import system returns what sys.modules holds after this call. To hand the real module over in
        # create_module instead would overwrite its __spec__ with the alias's.
        name = module.__spec__.name
        sys.modules[name] = importlib.import_module(self.target + name.removeprefix(self.name))


def alias(name: str, target: str) -> None:
    """Make `name` and its submodules other names for the package `target`, which is imported."""
    if not any(isinstance(f, _AliasFinder) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder(name, target))
    sys.modules[name] = importlib.import_module(target)
