"""What watches answers and changes none of them: a file per listener. Their list is in `kvrag.answer`."""
