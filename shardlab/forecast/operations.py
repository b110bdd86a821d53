"""Residuals of the fits, by operation, size and number of ranks."""

from shardlab.core.document import Document
from shardlab.experiment.link import bucket_bytes
from shardlab.forecast.costs import Measured
from shardlab.forecast.machine import Machine, quickly
from shardlab.forecast.schedule import Task, duration, simulate
from shardlab.measurements.calibration import Calibration, Operation


class OperationFit(Document):
    """Measured and fitted time of one operation at one size."""

    operation: Operation
    world_size: int
    link: str
    nbytes: int
    """bytes of the whole vector"""
    measured_ms: float
    fitted_ms: float
    error: float
    """fitted / measured - 1"""
    efficiency: float
    """fraction of asymptotic bandwidth, the rate of the fit for infinite size, reached at this size
    """


def operation_fits(calibration: Calibration, machine: Machine) -> list[OperationFit]:
    """Compare every measured operation with the fit."""
    fits = []
    for each in calibration.transfers:
        bits = each.bits_per_second
        costs = Measured(
            machine,
            each.world_size,
            float(calibration.host["cores"]),
            bits,
            bucket=0.0 if bits is None else bucket_bytes(bits),
        )
        phase = costs.transfer(each.operation, each.nbytes)
        task = Task("one", "one", (phase,))
        fitted, measured = duration(simulate([task], costs.rank)), quickly(each.seconds)
        beta = machine.transport[each.operation].beta * each.wire_bytes
        endless = max(beta, phase.nbytes / costs.rank.bytes_per_second)
        fits.append(
            OperationFit(
                operation=each.operation,
                world_size=each.world_size,
                link=each.link,
                nbytes=each.nbytes,
                measured_ms=1e3 * measured,
                fitted_ms=1e3 * fitted,
                error=fitted / measured - 1,
                efficiency=endless / measured,
            )
        )
    return fits
