"""What is cached where: block hashes, the radix index of residencies, and the events that feed it.

What is exported is listed in ``__init__.pyi`` and imported when it is asked for: who needs a name does without the
compiler that the index needs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
