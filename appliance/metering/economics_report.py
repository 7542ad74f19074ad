"""Reads the inputs of `economics`: the hardware record and the usage of the last thirty days."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from appliance.base.clock import Clock
from appliance.base.errors import NotFound
from appliance.metering.appliance_records import HARDWARE, ApplianceRecords
from appliance.metering.economics import (
    MEASURED_DAYS,
    Economics,
    Hardware,
    Measured,
    economics_of,
    hardware_from_record,
)
from appliance.metering.usage import UsageReports
from appliance.tenancy.access import WHOLE_APPLIANCE


class EconomicsReport:
    """The hardware as entered by the operator, and the figures computed from it and the measured usage."""

    def __init__(self, records: ApplianceRecords, reports: UsageReports, clock: Clock) -> None:
        self._records = records
        self._reports = reports
        self._clock = clock

    async def hardware(self) -> Hardware | None:
        """Return the hardware, None if it was never entered."""
        record = await self._records.get(HARDWARE)
        return None if record is None else hardware_from_record(record)

    async def set_hardware(self, hardware: Hardware) -> None:
        """Replace the stored hardware."""
        await self._records.put(HARDWARE, hardware.to_record())

    async def report(self, gpu_power_w: list[int]) -> tuple[Hardware, Economics]:
        """Return the hardware and the figures. Raises NotFound if the hardware was never entered."""
        hardware = await self.hardware()
        if hardware is None:
            raise NotFound("the cost of the hardware has not been entered yet: PUT /admin/v1/economics", param="hardware")
        return hardware, economics_of(hardware, await self.measured(), gpu_power_w)

    async def measured(self) -> Measured:
        """Return the usage of the last MEASURED_DAYS up to the last full hour, from stored sums, not from events."""
        end = self._clock.now().replace(minute=0, second=0, microsecond=0)
        start = end - timedelta(days=MEASURED_DAYS)
        rows = await self._reports.usage(start, end, "hour", access=WHOLE_APPLIANCE)
        by_hour: Counter[datetime] = Counter()
        for row in rows:
            by_hour[row.start] += row.prompt_tokens + row.completion_tokens
        busiest = max(by_hour, key=lambda hour: (by_hour[hour], hour), default=None)
        return Measured(
            start=start,
            end=end,
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            cached_tokens=sum(row.cached_tokens for row in rows),
            completion_tokens=sum(row.completion_tokens for row in rows),
            busy_hour_tokens=0 if busiest is None else by_hour[busiest],
            busy_hour=busiest,
        )
