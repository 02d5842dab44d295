"""Software of workloads, by the names that predictions print."""

from deep_optimizer_states.predict.workload import STOCK
from launch.simulate.workloads import paper_software

SOFTWARE = {"plugin": None, **{each.name: each for each in (STOCK, *paper_software().values())}}
