"""What FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers and reduces together, as units."""

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.layout import REPLICAS
from shardlab.comm.names import plain
from shardlab.core.errors import UserError


def replicated(name: str, names: dict[nn.Module, str], group: FSDPParamGroup) -> Unit:
    """One rank's part of a unit: its rows of every block."""
    size = group._reduce_scatter_process_group.size()
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    blocks = [block_of(p, names, group) for p in trained]
    return Unit(
        name + REPLICAS, tuple(Block(b.name, -(-b.rows // size), b.columns) for b in blocks)
    )


def units_of(model: nn.Module) -> list[tuple[str, FSDPModule, FSDPParamGroup]]:
    """Every unit's name, module and group of parameters; modules of one unit count once."""
    found: dict[int, tuple[str, FSDPModule, FSDPParamGroup]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = module._get_fsdp_state()._fsdp_param_groups
        if len(groups) > 1 or not all(isinstance(g.mesh_info, FSDPMeshInfo) for g in groups):
            raise UserError(
                f"fsdp2: {plain(name) or 'root'!r} does not shard its parameters over one mesh, "
                "and torch takes no custom collectives for that: shard it by fully_shard alone"
            )
        for group in groups:
            found.setdefault(id(group), (plain(name) or "root", module, group))
    return list(found.values())


def block_of(parameter: FSDPParam, names: dict[nn.Module, str], group: FSDPParamGroup) -> Block:
    """Rows are what is cut into chunks: of another dimension than the first, every rank's cut."""
    info = parameter._module_info
    size = parameter._orig_size
    cut = parameter.fsdp_placement.dim
    rows = size[0] * (group._reduce_scatter_process_group.size() if cut else 1)
    name = ".".join(filter(None, [names[info.module], info.param_name]))
    return Block(name, rows, size.numel() // rows)
