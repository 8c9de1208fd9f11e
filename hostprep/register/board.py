"""The rank board, under its documented name: see `hostprep.cuda.board`."""

from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.board_view import BoardReader, BoardView, RankView

__all__ = ["BoardReader", "BoardView", "RankBoard", "RankView", "board_path"]
