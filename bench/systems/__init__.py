"""What is measured: workloads, models, and the systems that train them."""
