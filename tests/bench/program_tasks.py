"""Ten tasks of agents, with 5 to 200 calls: their tools, what they ask, a program, and the facts that are true.

    python -m tests.bench.program_tasks    # an MCP server over stdin and stdout, with the tools of all tasks

Each world is made of random numbers with a fixed seed, and of a few facts that the task has to find.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias, get_type_hints

import mcp_types
from mcp.server import Server
from mcp.server.stdio import stdio_server

Json: TypeAlias = dict[str, Any]

TYPES = {str: "string", int: "integer"}


@dataclass(frozen=True)
class Task:
    name: str
    calls: int
    functions: tuple[Callable[..., Any], ...]
    question: str
    program: str
    """It calls the functions by their names, and prints the answer."""
    facts: str
    """The answer, which follows from the world."""

    def call(self, name: str, arguments: str) -> str:
        """Run a function of the task, from JSON to JSON."""
        [function] = (each for each in self.functions if each.__name__ == name)
        return json.dumps(function(**json.loads(arguments)))


def schema_of(function: Callable[..., Any]) -> Json:
    """Return the JSON schema of a function's parameters."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return {
        "type": "object",
        "properties": {each.name: {"type": TYPES[hints[each.name]]} for each in parameters},
        "required": [each.name for each in parameters if each.default is each.empty],
        "additionalProperties": False,
    }


def drawn(*key: object) -> Random:
    """Return the random numbers of a thing of the world."""
    return Random(" ".join(map(str, key)))


# Five calls


def get_weather(city: str) -> Json:
    """Get the weather of a city now."""
    warmest = {"Athens": 31}
    return {"city": city, "celsius": warmest.get(city, drawn(city).randint(4, 29)), "sky": "clear"}


WEATHER = Task(
    "weather",
    5,
    (get_weather,),
    "Which of Oslo, Athens, Madrid, Paris and Rome is the warmest now?",
    """import asyncio
cities = ["Oslo", "Athens", "Madrid", "Paris", "Rome"]
found = await asyncio.gather(*(get_weather(city=city) for city in cities))
warmest = max(found, key=lambda each: each["celsius"])
print(f"{warmest['city']}, {warmest['celsius']} degrees")
""",
    "Athens, 31 degrees",
)

# One call after another

BAD = 613


def run_test(commit: int) -> Json:
    """Run the test on a commit, by its number."""
    return {"commit": commit, "passed": commit < BAD, "seconds": drawn(commit).randint(20, 90)}


BISECT = Task(
    "bisect",
    10,
    (run_test,),
    "The test passes at commit 0 and fails at commit 1000. Which commit broke it?",
    """good, bad = 0, 1000
while bad - good > 1:
    middle = (good + bad) // 2
    if (await run_test(commit=middle))["passed"]:
        good = middle
    else:
        bad = middle
print(f"Commit {bad} broke the test.")
""",
    f"Commit {BAD} broke the test.",
)

PAGES, PER_PAGE, CITED = 24, 10, "paper-117"


def search_papers(query: str, cursor: int = 0) -> Json:
    """Search papers. A page has ten; next is the cursor of the next page, or null."""
    papers = []
    for number in range(cursor, cursor + PER_PAGE):
        random, name = drawn(query, number), f"paper-{number:03d}"
        papers.append(
            {
                "id": name,
                "title": f"On {query}, part {number}",
                "year": 2025 if number % 7 == 3 else random.randint(2010, 2024),
                "venue": random.choice(["ICML", "NeurIPS", "ACL", "OSDI", "SOSP"]),
                "citations": 9000 if name == CITED else random.randint(0, 800),
                "open_access": random.random() < 0.5,
            }
        )
    following = cursor + PER_PAGE
    return {"results": papers, "next": following if following < PAGES * PER_PAGE else None}


PAPERS = Task(
    "papers",
    PAGES,
    (search_papers,),
    "How many papers about caches are of 2025, and which paper about caches has the most citations?",
    """cursor, papers = 0, []
while cursor is not None:
    page = await search_papers(query="caches", cursor=cursor)
    papers += page["results"]
    cursor = page["next"]
recent = sum(paper["year"] == 2025 for paper in papers)
print(f"{recent} papers of 2025; {max(papers, key=lambda paper: paper['citations'])['id']} has the most citations.")
""",
    f"{len(range(3, PAGES * PER_PAGE, 7))} papers of 2025; {CITED} has the most citations.",
)

# Many calls at once

LEVELS = {"junior": 1000, "senior": 2000, "lead": 3000}
OVER = ("Employee 3", "Employee 11", "Employee 17")


def list_employees() -> list[Json]:
    """List the employees of the department."""
    return [
        {"id": f"e{at:02d}", "name": f"Employee {at}", "level": list(LEVELS)[at % 3], "office": f"B{at % 4}"}
        for at in range(20)
    ]


def get_budget(level: str) -> Json:
    """Get the travel budget of a level for a quarter, in euros."""
    return {"level": level, "quarterly": LEVELS[level]}


def get_expenses(employee: str, quarter: str) -> Json:
    """List what an employee, by id, has spent on travel in a quarter."""
    random = drawn(employee, quarter)
    [person] = [each for each in list_employees() if each["id"] == employee]
    most = LEVELS[person["level"]] // 15
    items = [
        {
            "date": f"2026-0{random.randint(7, 9)}-{random.randint(10, 28)}",
            "category": random.choice(["train", "flight", "hotel", "meals"]),
            "amount": 2 * most if person["name"] in OVER else random.randint(most // 3, most),
            "receipt": f"r-{random.randint(10**6, 10**7)}",
            "approved": True,
        }
        for _ in range(15)
    ]
    return {"employee": employee, "quarter": quarter, "items": items}


BUDGETS = Task(
    "budgets",
    24,
    (list_employees, get_budget, get_expenses),
    "Which employees have spent more than their budget for travel in 2026-Q3?",
    """import asyncio
people = await list_employees()
levels = sorted({person["level"] for person in people})
budgets = await asyncio.gather(*(get_budget(level=level) for level in levels))
allowed = {budget["level"]: budget["quarterly"] for budget in budgets}
spent = await asyncio.gather(*(get_expenses(employee=person["id"], quarter="2026-Q3") for person in people))
over = [
    person["name"]
    for person, expenses in zip(people, spent)
    if sum(item["amount"] for item in expenses["items"]) > allowed[person["level"]]
]
print("Over budget:", ", ".join(over))
""",
    f"Over budget: {', '.join(OVER)}",
)


def list_orders(day: str) -> list[Json]:
    """List the orders of a day, with totals in euros."""
    random = drawn(day)
    orders = []
    for number in range(60):
        customer = number % 40
        total = random.randint(900, 999) if customer % 8 == 5 else random.randint(10, 90)
        orders.append({"id": f"o-{number:04d}", "customer": f"c-{customer:03d}", "total": total, "paid": True})
    return orders


def get_customer(id: str) -> Json:  # noqa: A002 - the name of the parameter for the model
    """Get a customer of the CRM."""
    number = int(id.removeprefix("c-"))
    country = "Chile" if number % 8 == 5 else drawn(id).choice(["France", "Italy", "Japan", "Kenya"])
    contact = {"email": f"{id}@example.com", "phone": f"+1 555 {number:04d}", "language": "en"}
    return {"id": id, "name": f"Customer {number}", "country": country, "since": 2001 + number % 20, "contact": contact}


ORDERS = Task(
    "orders",
    41,
    (list_orders, get_customer),
    "Which country brought the highest revenue on 2026-11-27?",
    """import asyncio
from collections import Counter
orders = await list_orders(day="2026-11-27")
ids = sorted({order["customer"] for order in orders})
customers = dict(zip(ids, await asyncio.gather(*(get_customer(id=each) for each in ids))))
revenue = Counter()
for order in orders:
    revenue[customers[order["customer"]]["country"]] += order["total"]
print(f"{revenue.most_common(1)[0][0]} brought the highest revenue.")
""",
    "Chile brought the highest revenue.",
)


def submit_report(branch: str, ticket: str = "") -> Json:
    """Submit the monthly report of a branch. If the office is busy, submit it again with the ticket."""
    if int(branch.removeprefix("b-")) % 3 == 0 and not ticket:
        return {"branch": branch, "status": "busy", "ticket": f"t-{drawn(branch).randint(1000, 9999)}"}
    return {"branch": branch, "status": "accepted", "receipt": f"r-{drawn(branch).randint(10**6, 10**7)}"}


REPORTS = Task(
    "reports",
    40,
    (submit_report,),
    "Submit the monthly reports of branches b-1 to b-30. How many needed a second attempt?",
    """import asyncio
async def submit(branch):
    answer, attempts = await submit_report(branch=branch), 1
    while answer["status"] == "busy":
        answer, attempts = await submit_report(branch=branch, ticket=answer["ticket"]), attempts + 1
    return attempts
attempts = await asyncio.gather(*(submit(f"b-{number}") for number in range(1, 31)))
print(f"{len(attempts)} reports are accepted; {sum(each > 1 for each in attempts)} needed a second attempt.")
""",
    "30 reports are accepted; 10 needed a second attempt.",
)

BEST = 7


def list_sales(shop: str, month: str) -> list[Json]:
    """List the sales of a shop in a month, with prices in euros."""
    random, is_best = drawn(shop, month), int(month[-2:]) == BEST
    return [
        {
            "day": day,
            "product": f"p-{random.randint(1, 500):03d}",
            "quantity": random.randint(5, 9) if is_best else random.randint(1, 4),
            "price": random.randint(60, 99) if is_best else random.randint(10, 59),
        }
        for day in range(1, 29)
    ]


SALES = Task(
    "sales",
    36,
    (list_sales,),
    "In which month of 2026 did the shops north, south and west together sell the most, in euros?",
    """import asyncio
months = [f"2026-{number:02d}" for number in range(1, 13)]
async def sold(month):
    shops = await asyncio.gather(*(list_sales(shop=shop, month=month) for shop in ("north", "south", "west")))
    return sum(sale["quantity"] * sale["price"] for sales in shops for sale in sales)
totals = await asyncio.gather(*(sold(month) for month in months))
print(f"{months[totals.index(max(totals))]} was the best month.")
""",
    f"2026-{BEST:02d} was the best month.",
)


def get_fares(origin: str, day: int) -> list[Json]:
    """List the flights from a city to Lisbon on a day of December 2026, with fares in euros."""
    random = drawn(origin, day)
    return [
        {
            "flight": f"FL{random.randint(100, 999)}",
            "departs": f"{random.randint(6, 22):02d}:{random.randint(10, 59)}",
            "stops": random.randint(0, 2),
            "fare": 39 if (origin, day, at) == ("Lyon", 9, 3) else random.randint(60, 400),
        }
        for at in range(8)
    ]


FARES = Task(
    "fares",
    56,
    (get_fares,),
    "When, and from which of Paris, Lyon, Nice and Lille, is the cheapest flight to Lisbon from 1 to 14 December 2026?",
    """import asyncio
choices = [(origin, day) for origin in ("Paris", "Lyon", "Nice", "Lille") for day in range(1, 15)]
found = await asyncio.gather(*(get_fares(origin=origin, day=day) for origin, day in choices))
fare, (origin, day) = min((min(each["fare"] for each in flights), choice) for flights, choice in zip(found, choices))
print(f"From {origin} on {day} December, for {fare} euros.")
""",
    "From Lyon on 9 December, for 39 euros.",
)

COPYLEFT = (7, 38, 61)


def get_package(name: str) -> Json:
    """Get the latest release of a package, and the packages that it needs."""
    number = int(name.removeprefix("pkg-"))
    needed = [each for each in (3 * number + 1, 3 * number + 2, 3 * number + 3) if each < 80]
    return {
        "name": name,
        "version": f"{drawn(name).randint(0, 9)}.{number}.0",
        "license": "AGPL-3.0" if number in COPYLEFT else drawn(name).choice(["MIT", "BSD-3-Clause", "Apache-2.0"]),
        "bytes": drawn(name).randint(10**4, 10**6),
        "needs": [f"pkg-{each}" for each in needed],
    }


PACKAGES = Task(
    "packages",
    80,
    (get_package,),
    "Which packages that pkg-0 needs, also through others, have the license AGPL-3.0?",
    """import asyncio
known, wanted = {}, ["pkg-0"]
while wanted:
    found = await asyncio.gather(*(get_package(name=name) for name in wanted))
    known.update(zip(wanted, found))
    wanted = sorted({name for package in found for name in package["needs"]} - set(known))
print("AGPL-3.0:", ", ".join(sorted(name for name, package in known.items() if package["license"] == "AGPL-3.0")))
""",
    f"AGPL-3.0: {', '.join(sorted(f'pkg-{number}' for number in COPYLEFT))}",
)

FAILING = (17, 102, 103, 188)


def check_host(host: str) -> Json:
    """Check the health of a host."""
    random, number = drawn(host), int(host.removeprefix("host-"))
    return {
        "host": host,
        "status": "failing" if number in FAILING else "ok",
        "load": random.randint(1, 90),
        "memory_free_mb": random.randint(500, 60000),
        "disk_free_gb": random.randint(5, 900),
        "kernel": f"6.12.{random.randint(10, 60)}",
        "uptime_hours": random.randint(1, 9000),
    }


HOSTS = Task(
    "hosts",
    200,
    (check_host,),
    "Which of host-1 to host-200 are failing?",
    """import asyncio
states = await asyncio.gather(*(check_host(host=f"host-{number}") for number in range(1, 201)))
print("Failing:", ", ".join(state["host"] for state in states if state["status"] == "failing"))
""",
    f"Failing: {', '.join(f'host-{number}' for number in FAILING)}",
)

TASKS = sorted(
    (WEATHER, BISECT, PAPERS, BUDGETS, ORDERS, REPORTS, SALES, FARES, PACKAGES, HOSTS), key=lambda task: task.calls
)


async def list_tools(_: Any, _params: Any) -> mcp_types.ListToolsResult:
    return mcp_types.ListToolsResult(
        tools=[
            mcp_types.Tool(name=each.__name__, description=inspect.getdoc(each), input_schema=schema_of(each))
            for task in TASKS
            for each in task.functions
        ]
    )


async def call_tool(_: Any, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
    task = next(task for task in TASKS if params.name in {each.__name__ for each in task.functions})
    text = task.call(params.name, json.dumps(params.arguments or {}))
    return mcp_types.CallToolResult(content=[mcp_types.TextContent(text=text)])


async def main() -> None:
    server = Server("office", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
