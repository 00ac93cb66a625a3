"""How long the index's kernels take to be ready. Import it first: a namespace at the top of a module needs them."""

import time

from cache_index import warm

_begin_s = time.perf_counter()
warm()
WARM_S = time.perf_counter() - _begin_s
