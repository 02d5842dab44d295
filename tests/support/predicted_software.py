"""Software of workloads, by the names that predictions print."""

from deep_optimizer_states.predict.stock import STOCK
from launch.simulate.paper_software import ASYNC_GRADIENTS, BASELINE, HYBRID

SOFTWARE = {
    "ours": None,
    **{each.name: each for each in (STOCK, BASELINE, ASYNC_GRADIENTS, HYBRID)},
}
