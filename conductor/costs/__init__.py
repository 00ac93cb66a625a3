"""The cost model: every estimate of the scheduler, in seconds, comes from here.

What is exported is listed in ``__init__.pyi`` and imported when it is asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
