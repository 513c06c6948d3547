import Foundation

/// What the program writes: answers to standard output, everything else to standard error.
enum Terminal {
    static func answer(_ piece: String) {
        print(piece, terminator: "")
        fflush(nil)
    }

    static func note(_ text: String, end: String = "\n") {
        FileHandle.standardError.write(Data((text + end).utf8))
    }
}
