"""How a job begins: on this host, on many hosts, by pyhvd.launch(), and as an elastic job."""
