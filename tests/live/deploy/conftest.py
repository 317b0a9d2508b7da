from __future__ import annotations

from tests.support.charts import HELM
from tests.support.routers import UNPACKED

collect_ignore = [
    name for name, needed in (("test_chart.py", HELM), ("test_routers.py", UNPACKED)) if not needed.exists()
]
