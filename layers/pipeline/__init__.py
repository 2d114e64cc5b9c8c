"""Pipeline parallelism: sends and receives between stages, and the schedules over them."""
