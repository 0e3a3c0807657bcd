"""MAY IT?  Pure: values in, a verdict out. Nothing here touches the machine."""
