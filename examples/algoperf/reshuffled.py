"""pooled.py in a new random order in every pass: what keeping the examples brings by itself."""

import pooled
from plain import get_batch_size, prepare_for_eval  # noqa: F401

from syncopate import ordering

init_optimizer_state, update_params, data_selection = pooled.submission(ordering.random_reshuffling)
