"""pooled.py with CD-GraB: balanced orders of what has been received, coordinated over workers."""

import pooled
from plain import get_batch_size, prepare_for_eval  # noqa: F401

from syncopate import ordering

init_optimizer_state, update_params, data_selection = pooled.submission(ordering.cd_grab)
