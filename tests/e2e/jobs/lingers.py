"""Leaves the job in good order, and then takes LINGER seconds to end."""

import os
import time

import elastic_driver as elastic

elastic.init()
elastic.shutdown()
time.sleep(float(os.environ["LINGER"]))
print("ended by itself", flush=True)
