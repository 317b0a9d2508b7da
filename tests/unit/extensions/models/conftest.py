pytest_plugins = ["tests.support.on_demand"]
