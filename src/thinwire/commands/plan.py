"""x"""
def command(a):
    return 0
