"""Write trained heads in the layouts that other engines serve.

layouts  which engine holds what, and its file names
eagle    EAGLE-1 and EAGLE-3 heads
medusa   Medusa heads
folder   write one, read it again and compare
"""

from .folder import ENGINES, Exported, export_head

__all__ = ["ENGINES", "Exported", "export_head"]
