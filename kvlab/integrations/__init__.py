"""kvlab behind the interfaces of other libraries; each module imports the library that it serves."""
